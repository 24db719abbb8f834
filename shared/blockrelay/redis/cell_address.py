"""Where a cell lives, for commands that look at it or change it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from blockrelay.errors import RedisTrouble, RedisUnavailable, ServiceUnavailable, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.redis import client as redis_link
from blockrelay.redis.connections import checked_url
from blockrelay.redis.protocol_check import check_protocol
from blockrelay.settings import Settings
from blockrelay.up_file import read_running


@dataclass(frozen=True, slots=True)
class CellAddress:
    """Where a cell lives."""

    redis_url: str
    settings: Settings

    @property
    def keys(self) -> Keys:
        return Keys(self.settings.cell)


def find_cell(url: str | None, data: Path | None) -> CellAddress:
    """The cell at `url`, of the `up` on `data`, or that of the settings. UsageError for both, or nothing running."""
    if url and data:
        raise UsageError("give --redis or --data, not both")
    if data:
        running = read_running(data)
        return CellAddress(running.redis_url, Settings(cell=running.cell, model=Path(running.model)))
    settings = Settings()
    return CellAddress(checked_url(url or settings.control_redis), settings)


@contextlib.contextmanager
def connected(cell: CellAddress) -> Iterator[redis.Redis]:
    """A client of the cell's Redis; ServiceUnavailable when it does not do what we ask, UsageError when the cell speaks
    another protocol."""
    client = redis_link.connect(cell.redis_url, cell=cell.settings.cell)
    try:
        check_protocol(client, cell.keys, join=False)
        yield client
    except RedisTrouble as error:
        silent = isinstance(error, RedisUnavailable) and not error.code
        hint = ": is it running? (--redis URL or --data DIR)" if silent else ""
        raise ServiceUnavailable(f"{error}{hint}") from error
    finally:
        client.close()
