"""Reads the protocol number of a cell, and checks that this release speaks it.

All functions with a client raise RedisTrouble.
"""

import re
from contextlib import suppress
from typing import Any, cast

import redis
import redis.asyncio

from blockrelay import __version__
from blockrelay.errors import RedisFull, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.number import LOWEST_PROTOCOL, NUMBERS, PROTOCOL, is_spoken, number_of

_NUMBER = re.compile(rb"[1-9]\d{0,8}")


def parse_number(value: object, keys: Keys) -> int:
    """Returns the number in the value of `{cell}:protocol`. Raises UsageError for anything but a number."""
    if isinstance(value, bytes) and _NUMBER.fullmatch(value):
        return int(value)
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    raise UsageError(
        f"the cell {keys.cell!r} speaks protocol {text!r}, which is not a number of Blockrelay's: use another cell "
        f"(BLOCKRELAY_CELL), or delete {keys.protocol} if nothing of the cell is needed"
    )


def read_number(client: redis.Redis, keys: Keys) -> int | None:
    """Returns the protocol number of the cell; None for a new cell.

    Raises UsageError for anything but a number, and for a cell that has requests and no number.
    """
    value = client.get(keys.protocol)
    if value is None and _has_requests(client, keys):
        value = client.get(
            keys.protocol
        )  # a service may have joined meanwhile: it writes the number before any request
        if value is None:
            raise UsageError(
                f"the cell {keys.cell!r} has requests and no protocol number, so no release wrote them: {_leave(keys)}"
            )
    return None if value is None else parse_number(value, keys)


async def read_gap_async(client: redis.asyncio.Redis, keys: Keys) -> str:
    """Returns why this service cannot work in the cell right now, for people; empty if it can."""
    value: object = await cast(Any, client.get(keys.protocol))
    if value is None:
        return "the cell speaks no protocol yet: it waits for a scheduler of this release"
    try:
        number = parse_number(value, keys)
    except UsageError as error:
        return str(error)
    if is_spoken(number):
        return ""
    return f"the cell speaks protocol {number}, and this service speaks {NUMBERS}: it must be of the cell's release"


def services_below(client: redis.Redis, keys: Keys, number: int) -> tuple[list[str], list[str]]:
    """Returns the ids of registered workers and of live gateways that do not speak protocol `number` yet."""
    workers = [name.decode() for name in cast("list[bytes]", client.zrange(keys.workers, 0, -1))]
    gateway_keys = [key.decode() for key in client.scan_iter(keys.gateway("*"), count=1000)]
    pipeline = client.pipeline(transaction=False)
    for name in workers:
        pipeline.hget(keys.worker(name), "protocol")
    for key in gateway_keys:
        pipeline.get(key)
    answers = pipeline.execute()
    of_workers, of_gateways = answers[: len(workers)], answers[len(workers) :]
    return (
        [name for name, speaks in zip(workers, of_workers, strict=True) if number_of(speaks) < number],
        [
            key.rpartition(":")[2]
            for key, speaks in zip(gateway_keys, of_gateways, strict=True)
            if speaks is not None and number_of(speaks) < number
        ],
    )


def check_protocol(client: redis.Redis, keys: Keys, *, join: bool) -> None:
    """Raises UsageError unless the cell is new or speaks a protocol of this release.

    With `join` it gives a new cell the highest number that this release speaks.
    """
    number = read_number(client, keys)
    if number is None and join:
        with suppress(RedisFull):  # a service that starts when there is room writes it
            client.set(keys.protocol, PROTOCOL, nx=True)
        number = read_number(client, keys)
    if number is None or is_spoken(number):
        return
    older = number < LOWEST_PROTOCOL
    remedy = f"finish its requests with a release that does, then {_leave(keys)}" if older else _JOIN_ITS_RELEASE
    raise UsageError(
        f"the cell {keys.cell!r} speaks protocol {number}, and Blockrelay {__version__} speaks {NUMBERS}: {remedy}"
    )


_JOIN_ITS_RELEASE = "run the release of its other services, or use another cell (BLOCKRELAY_CELL)"


def _leave(keys: Keys) -> str:
    """Returns the remedy for a cell whose records no service can read."""
    return f"use another cell (BLOCKRELAY_CELL), or delete all its keys ({keys.all}) if nothing of it is needed"


def _has_requests(client: redis.Redis, keys: Keys) -> bool:
    return any(True for _ in client.scan_iter(keys.request("*"), count=1000))
