"""Which protocol a cell speaks, and whether this release speaks it too."""

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


def parse_number(found: object, keys: Keys) -> int:
    """The number in `{cell}:protocol`. Raises UsageError for anything but a number."""
    if isinstance(found, bytes) and _NUMBER.fullmatch(found):
        return int(found)
    text = found.decode(errors="replace") if isinstance(found, bytes) else found
    raise UsageError(
        f"the cell {keys.cell!r} speaks protocol {text!r}, which is not a number of Blockrelay's: use another cell "
        f"(BLOCKRELAY_CELL), or delete {keys.protocol} if nothing of the cell is needed"
    )


def read_number(client: redis.Redis, keys: Keys) -> int | None:
    """The protocol number of the cell; None for a new cell. Raises UsageError for anything but a number, and for a
    cell that has requests and no number."""
    found = client.get(keys.protocol)
    if found is None and _has_requests(client, keys):
        found = client.get(keys.protocol)  # a service has joined meanwhile: the number comes before any request
        if found is None:
            raise UsageError(
                f"the cell {keys.cell!r} has requests and no protocol number, so no release wrote them: {_leave(keys)}"
            )
    return None if found is None else parse_number(found, keys)


async def read_gap_async(client: redis.asyncio.Redis, keys: Keys) -> str:
    """Why this service can do nothing in the cell right now, for people; empty where it can."""
    found: object = await cast(Any, client.get(keys.protocol))
    if found is None:
        return "the cell speaks no protocol yet: it waits for a scheduler of this release"
    try:
        number = parse_number(found, keys)
    except UsageError as error:
        return str(error)
    if is_spoken(number):
        return ""
    return f"the cell speaks protocol {number}, and this service speaks {NUMBERS}: it must be of the cell's release"


def services_below(client: redis.Redis, keys: Keys, number: int) -> tuple[list[str], list[str]]:
    """Registered workers and living gateways that do not speak `number` yet: worker ids, names of gateways."""
    workers = [name.decode() for name in cast("list[bytes]", client.zrange(keys.workers, 0, -1))]
    found = [name.decode() for name in client.scan_iter(keys.gateway("*"), count=1000)]
    ask = client.pipeline(transaction=False)
    for name in workers:
        ask.hget(keys.worker(name), "protocol")
    for name in found:
        ask.get(name)
    answers = ask.execute()
    of_workers, of_gateways = answers[: len(workers)], answers[len(workers) :]
    return (
        [name for name, speaks in zip(workers, of_workers, strict=True) if number_of(speaks) < number],
        [
            name.rpartition(":")[2]
            for name, speaks in zip(found, of_gateways, strict=True)
            if speaks is not None and number_of(speaks) < number
        ],
    )


def check_protocol(client: redis.Redis, keys: Keys, *, join: bool) -> None:
    """Raise UsageError unless the cell speaks a protocol of ours, or none yet; with `join` a new cell speaks our
    highest from then on."""
    number = read_number(client, keys)
    if number is None and join:
        with suppress(RedisFull):  # written by a service that starts when there is room
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
    """The remedy for a cell whose records no service can read."""
    return f"use another cell (BLOCKRELAY_CELL), or delete all its keys ({keys.all}) if nothing of it is needed"


def _has_requests(client: redis.Redis, keys: Keys) -> bool:
    return any(True for _ in client.scan_iter(keys.request("*"), count=1000))
