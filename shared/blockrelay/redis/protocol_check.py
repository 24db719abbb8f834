"""Which protocol a cell speaks, and whether that is ours."""

import re
from contextlib import suppress
from dataclasses import dataclass

import redis

from blockrelay import __version__
from blockrelay.errors import RedisFull, RedisRefused, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.number import PROTOCOL

_SPOKEN = re.compile(rb"([1-9]\d{0,8})(?:>([1-9]\d{0,8}))?")


@dataclass(frozen=True, slots=True)
class Spoken:
    """The number of a cell's protocol, and the one that a scheduler brings it to (in Redis `<number>><target>`)."""

    number: int
    target: int | None = None

    @property
    def is_ours(self) -> bool:
        return (self.number, self.target) == (PROTOCOL, None)

    @property
    def is_older(self) -> bool:
        """Whether a scheduler of this release can bring the cell to our protocol, or is doing it."""
        return self.number < PROTOCOL and self.target in (None, PROTOCOL)

    def __str__(self) -> str:
        return f"protocol {self.number}" + (f" and is being brought to {self.target}" if self.target else "")


def read_spoken(client: redis.Redis, keys: Keys) -> Spoken | None:
    """What the cell speaks; None for a new cell. Raises UsageError when its number is not one."""
    found = client.get(keys.protocol)
    if found is None:
        return Spoken(1) if _is_of_protocol_1(client, keys) else None
    match = _SPOKEN.fullmatch(found) if isinstance(found, bytes) else None
    if match is None:
        raise UsageError(
            f"the cell {keys.cell!r} speaks protocol {found!r}, which is not a number: is {keys.protocol} ours?"
        )
    return Spoken(int(match[1]), int(match[2]) if match[2] else None)


def _is_of_protocol_1(client: redis.Redis, keys: Keys) -> bool:
    """Release 0.1.0 wrote no number; every request that it accepted left one of these keys for good."""
    return any(True for _ in client.scan_iter(keys.load("*"), count=1000))


def check_protocol(client: redis.Redis, keys: Keys, *, join: bool) -> None:
    """Raise unless the cell speaks our protocol, or none yet; with `join` it speaks ours from then on.

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
    says = f"the cell {keys.cell!r} speaks {spoken}, and Blockrelay {__version__} speaks {PROTOCOL}"
    if not spoken.is_older:
        raise UsageError(
            f"{says}: run the release that its other services are of, or use another cell (BLOCKRELAY_CELL)"
        )
    if join:
        raise RedisRefused(f"{says}: waiting for a scheduler of this release to upgrade it", code="PROTOCOL")
    raise UsageError(f"{says}: start a scheduler of this release, which upgrades it")
