"""The settings that all services have."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from blockrelay import failpoints
from blockrelay.auth.redis_settings import RedisSettings
from blockrelay.protocol.encoding.request_ids import CELL

BUNDLED_MODEL = Path(__file__).parent.parent / "models" / "storyteller"

#: Longest retention: a year, in seconds.
MAX_RETENTION_S = 366 * 24 * 3600


class Settings(RedisSettings):
    """The settings that all services have."""

    model: Path = Field(default=BUNDLED_MODEL, description="block folder")
    model_name: str | None = Field(default=None, description="name clients use; default: the manifest's")
    cell: str = Field(default="c0", pattern=rf"^{CELL}$", description="name of the cell")
    node_id: str | None = Field(default=None, description="node_id of log lines; default: role, host and pid")
    host: str = Field(default="127.0.0.1", description="address the service listens on")
    degrade: Literal["on", "off"] = Field(
        default="off",
        description="for schedulers and workers; on: change to a smaller of the precisions where memory lacks",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="lowest level of log lines that are written"
    )
    log_prompts: bool = Field(default=False, description="write prompts and texts into the log (never by default)")
    failpoint: str = Field(default="", description="fail, sleep or stop at a named point (docs/states.md); tests")

    def served_name(self, own: str) -> str:
        """Returns the model's name for clients and metrics; `own` is its name in the manifest."""
        return self.model_name or own

    @field_validator("failpoint")
    @classmethod
    def _is_failpoint(cls, value: str) -> str:
        failpoints.parse(value)
        return value
