"""The settings of all services for the Redis servers of a cell and their passwords."""

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from blockrelay.auth.password_file import has_password, with_password_file


class RedisSettings(BaseSettings):
    """Addresses and passwords of the Redis servers; the base of all services' settings (`blockrelay.settings`)."""

    model_config = SettingsConfigDict(
        env_prefix="BLOCKRELAY_", frozen=True, extra="ignore", protected_namespaces=(), allow_inf_nan=False
    )

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="URL of the control Redis (AOF, fsync always), its Sentinels or cluster (docs/operations.md)",
    )
    payload_redis_url: str | None = Field(
        default=None,
        description="URL of the payload Redis (hidden states, tensor results, shared KV pages); default: the control "
        "Redis",
    )
    redis_password_file: str | None = Field(
        default=None,
        description="file whose first line is the password for redis_url, read for each new connection; default: the "
        "URL has it",
    )
    payload_redis_password_file: str | None = Field(
        default=None, description="password file for payload_redis_url; default: redis_password_file; empty: none"
    )

    @property
    def control_redis(self) -> str:
        """The URL of the control Redis, with the parameter `password_file` if that is set."""
        return with_password_file(self.redis_url, self.redis_password_file)

    @property
    def payload_redis(self) -> str | None:
        """The URL of the payload Redis, with `password_file` if that is set; None: the control Redis serves as it."""
        if self.payload_redis_url is None:
            return None
        file = self.payload_redis_password_file
        return with_password_file(self.payload_redis_url, self.redis_password_file if file is None else file)

    @field_validator("redis_password_file", "payload_redis_password_file")
    @classmethod
    def _is_the_only_password(cls, value: str | None, info: ValidationInfo) -> str | None:
        url = str(info.field_name).replace("password_file", "url")
        if value and has_password(info.data.get(url) or ""):
            raise ValueError(f"BLOCKRELAY_{url.upper()} has a password already: take it out, or leave the file out")
        return value
