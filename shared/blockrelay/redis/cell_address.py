"""Finds the Redis of a cell for commands that read or change the cell."""

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
    """The control Redis of a cell, and the settings that name the cell."""

    redis_url: str
    settings: Settings

    @property
    def keys(self) -> Keys:
        return Keys(self.settings.cell)


def find_cell(url: str | None, data: Path | None) -> CellAddress:
    """Returns the cell at `url`, or that of the `blockrelay up` running on folder `data`, or that of the settings.

    Raises UsageError if both are given, if nothing runs on `data`, or if the URL is not that of a Redis. Raises
    pydantic's ValidationError for wrong settings in the environment.
    """
    if url and data:
        raise UsageError("give --redis or --data, not both")
    if data:
        running = read_running(data)
        return CellAddress(running.redis_url, Settings(cell=running.cell, model=Path(running.model)))
    settings = Settings()
    return CellAddress(checked_url(url or settings.control_redis), settings)


@contextlib.contextmanager
def connected(cell: CellAddress) -> Iterator[redis.Redis]:
    """Yields a client of the cell's Redis.

    Raises UsageError when the cell speaks another protocol, and ServiceUnavailable for RedisTrouble, also in the body.
    """
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
