"""`DATA/up.json`: how to reach what a `blockrelay up` runs on a data folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from blockrelay.errors import UsageError

NAME = "up.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The content of the file. `redis_url` may carry a password: the folder is its owner's alone."""

    pid: int
    url: str
    urls: list[str]  # of every gateway; `url` is the first
    redis_url: str
    payload_redis_url: str | None
    cell: str
    model: str
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Service -> why it ended at its last start: it can serve only when that is mended."""


def read_running(data: Path) -> Running:
    """What runs in a data folder, as far as its `up` told. Raises UsageError when nothing does."""
    try:
        return Running(**json.loads((data / NAME).read_text()))
    except FileNotFoundError:
        raise UsageError(f"no `up` runs on --data {data}: it has no {NAME}") from None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{data / NAME} cannot be read: {error}") from error
