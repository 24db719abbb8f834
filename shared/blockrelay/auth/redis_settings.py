"""Where the Redis servers of a cell are and by which passwords we come in: those settings of every service."""

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from blockrelay.auth.password_file import has_password, with_password_file


class RedisSettings(BaseSettings):
    """What the settings of all services begin with (`blockrelay.settings.Settings`)."""

    model_config = SettingsConfigDict(
        env_prefix="BLOCKRELAY_", frozen=True, extra="ignore", protected_namespaces=(), allow_inf_nan=False
    )

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="control Redis (AOF, fsync always); its Sentinels or cluster too (docs/operations.md)",
    )
    payload_redis_url: str | None = Field(default=None, description="Redis for rows; default: the control Redis")
    redis_password_file: str | None = Field(
        default=None,
        description="file whose first line is the password for redis_url, read for each new connection; default: the "
        "URL has it",
    )
    payload_redis_password_file: str | None = Field(
        default=None, description="the same for payload_redis_url; default: the same file; empty: none"
    )

    @property
    def control_redis(self) -> str:
        """The URL of the control Redis, which names the file of its password if there is one."""
        return with_password_file(self.redis_url, self.redis_password_file)

    @property
    def payload_redis(self) -> str | None:
        """The same of the Redis for rows."""
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
