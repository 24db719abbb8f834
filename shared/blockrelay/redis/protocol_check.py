"""Which protocol a cell speaks, and whether this release speaks it too."""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import redis
import redis.asyncio

from blockrelay import __version__
from blockrelay.errors import RedisFull, RedisRefused, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.number import NUMBERS, PROTOCOL, is_spoken, number_of

_SPOKEN = re.compile(rb"([1-9]\d{0,8})(?:>([1-9]\d{0,8}))?")


@dataclass(frozen=True, slots=True)
class Spoken:
    """The number of a cell's protocol, and the one that a scheduler brings it to (in Redis `<number>><target>`)."""

    number: int
    target: int | None = None

    @property
    def is_ours(self) -> bool:
        return self.target is None and is_spoken(self.number)

    @property
    def is_older(self) -> bool:
        """Whether a scheduler of this release can bring the cell to a protocol of ours, or is doing it (from one of
        ours too, when something of an older one has come behind an upgrade)."""
        if self.target is None:
            return self.number <= PROTOCOL and not self.is_ours
        return self.number <= self.target and is_spoken(self.target)

    @property
    def gap(self) -> str:
        """Why nothing can be done in the cell right now, as people are told; empty where it is ours."""
        if self.is_ours:
            return ""
        if self.is_older:
            return f"the cell speaks {self}: it waits for a scheduler of this release, which upgrades it"
        return f"the cell speaks {self}, and this service speaks {NUMBERS}: it must be of the cell's release"

    def __str__(self) -> str:
        return f"protocol {self.number}" + (f" and is being upgraded to {self.target}" if self.target else "")


def parse_spoken(found: object, keys: Keys) -> Spoken:
    """What stands in `{cell}:protocol`. Raises UsageError when it is not one of Blockrelay's numbers."""
    match = _SPOKEN.fullmatch(found) if isinstance(found, bytes) else None
    if match is None:
        said = found.decode(errors="replace") if isinstance(found, bytes) else found
        raise UsageError(
            f"the cell {keys.cell!r} speaks protocol {said!r}, which is not a number of Blockrelay's: use another cell "
            f"(BLOCKRELAY_CELL), or delete {keys.protocol} if nothing of the cell is needed"
        )
    return Spoken(int(match[1]), int(match[2]) if match[2] else None)


def read_spoken(client: redis.Redis, keys: Keys) -> Spoken | None:
    """What the cell speaks; None for a new cell. Raises UsageError when its number is not one."""
    found = client.get(keys.protocol)
    if found is not None:
        return parse_spoken(found, keys)
    return Spoken(1) if has_older_keys(client, keys) or any(services_below(client, keys, PROTOCOL)) else None


async def read_gap_async(client: redis.asyncio.Redis, keys: Keys) -> str:
    """`Spoken.gap` of the cell, or what is wrong with its number. One without a number is new, or of release 0.1.0: a
    scheduler looks which, and nothing can be done there before."""
    found: object = await cast(Any, client.get(keys.protocol))
    if found is None:
        return "the cell speaks no protocol yet: it waits for a scheduler of this release"
    try:
        return parse_spoken(found, keys).gap
    except UsageError as error:
        return str(error)


def has_older_keys(client: redis.Redis, keys: Keys) -> bool:
    """Whether there is a key that every request left for good which a gateway of protocol 1 or 2 accepted."""
    return any(True for _ in client.scan_iter(keys.load("*"), count=1000))


def services_below(client: redis.Redis, keys: Keys, number: int) -> tuple[list[str], list[str]]:
    """Registered workers and living gateways that do not speak `number` yet: worker ids, names of gateways."""
    workers = [name.decode() for name in cast("list[bytes]", client.zrange(keys.workers, 0, -1))]
    found = [name.decode() for name in client.scan_iter(keys.gateway("*"), count=1000)]
    ask = client.pipeline(transaction=False)
    for name in workers:
        ask.hmget(keys.worker(name), "protocol", "v")
    for name in found:
        ask.get(name)
    answers = ask.execute()
    told, gateways = answers[: len(workers)], answers[len(workers) :]
    return (
        [name for name, (speaks, v) in zip(workers, told, strict=True) if number_of(speaks or v) < number],
        [
            name.rpartition(":")[2]
            for name, speaks in zip(found, gateways, strict=True)
            if speaks is not None and number_of(speaks) < number
        ],
    )


def check_protocol(client: redis.Redis, keys: Keys, *, join: bool) -> None:
    """Raise unless the cell speaks a protocol of ours, or none yet; with `join` it speaks our highest from then on.

    Raises:
        RedisRefused: with `join`, and the cell speaks an older one: a scheduler of this release is to be waited for.
        UsageError: it speaks another one.
    """
    spoken = read_spoken(client, keys)
    if spoken is None and join:
        with suppress(RedisFull):  # written by a service that starts when there is room
            client.set(keys.protocol, PROTOCOL, nx=True)
        spoken = read_spoken(client, keys)
    if spoken is None or spoken.is_ours:
        return
    says = f"the cell {keys.cell!r} speaks {spoken}, and Blockrelay {__version__} speaks {NUMBERS}"
    if not spoken.is_older:
        raise UsageError(f"{says}: run the release of its other services, or use another cell (BLOCKRELAY_CELL)")
    if join:
        raise RedisRefused(f"{says}: waiting for a scheduler of this release to upgrade it", code="PROTOCOL")
    raise UsageError(f"{says}: start a scheduler of this release, which upgrades it")
