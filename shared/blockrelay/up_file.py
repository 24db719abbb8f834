"""The file `DATA/up.json` with the addresses of the services that `blockrelay up` runs on a data folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from blockrelay.errors import UsageError

NAME = "up.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The content of the file."""

    pid: int  # of `blockrelay up`
    url: str  # of the first gateway
    urls: list[str]  # of all gateways
    redis_url: str  # may have a password: only the folder's owner can read the file
    payload_redis_url: str | None
    cell: str
    model: str  # block folder
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Services that cannot start, by name, with the reason: it must be mended before they can."""


def read_running(data: Path) -> Running:
    """Reads what `blockrelay up` runs on the folder `data`. Raises UsageError if there is no such file, or a bad one.

    A process that was killed leaves the file behind, so `pid` may be that of a process that has ended.
    """
    try:
        return Running(**json.loads((data / NAME).read_text()))
    except FileNotFoundError:
        raise UsageError(f"no `up` runs on --data {data}: it has no {NAME}") from None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{data / NAME} cannot be read: {error}") from error
