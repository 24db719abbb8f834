"""The record of what a running system has measured, in `measured-profile:<model>`: one for all schedulers of a cell.

Each of them corrects it from the same workers and replaces it by compare-and-set, so that they agree. All functions
with a client raise RedisTrouble.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import redis

from blockrelay.errors import WireError
from blockrelay.observability import logs
from blockrelay.protocol.encoding import checks
from blockrelay.protocol.keys import Keys
from blockrelay.redis.errors import CommandError, Overtaken

#: Factors beyond these are damage: a guess may be far off, but not so far.
_LEAST, _MOST = 1e-6, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """How far a system is from the profile that its plan was made from, and since when another plan would be better."""

    processes: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds measured for one that the profile says, by the process of a worker, `<host>:<pid>`."""
    blocks: Mapping[int, float] = field(default_factory=dict[int, float])
    """The same for blocks that are unlike the others, such as the head, by number; beside the factor of the process."""
    better_since_ms: int | None = None
    """Since when other borders would be better by enough (Unix time of Redis); None: they would not."""
    replanned_ms: int | None = None
    """When borders were last moved; None: never."""

    def to_json(self) -> str:
        """Returns the content of the record; `decode` is the inverse."""
        return json.dumps(asdict(self), sort_keys=True)


def rounded(factor: float) -> float:
    """Returns a factor as records have it: with four digits, between the least and the most that `decode` takes."""
    return float(f"{min(max(factor, _LEAST), _MOST):.4g}")


def decode(content: bytes | None) -> MeasuredProfile | None:
    """Reads a record; None if there is none, or if it is damaged."""
    if content is None:
        return None
    try:
        with checks.reading("measured profile"):
            fields = checks.entries(json.loads(content))
            return MeasuredProfile(
                processes={name: _factor(one) for name, one in checks.entries(fields["processes"]).items()},
                blocks={int(number): _factor(one) for number, one in checks.entries(fields["blocks"]).items()},
                better_since_ms=_moment(fields["better_since_ms"]),
                replanned_ms=_moment(fields["replanned_ms"]),
            )
    except WireError:
        return None


def read(client: redis.Redis, keys: Keys, model: str) -> bytes | None:
    """Returns the record as it is in Redis; None if there is none.

    Removes a key that is no text, which people can only have made by hand: the record is measured again.
    """
    key = keys.measured_profile(model)
    try:
        return cast(Any, client.get(key))
    except CommandError:
        logs.get().warning("MEASURED_PROFILE_DAMAGED", key=key, reason="it is measured again")
        client.delete(key)
        return None


def replace(client: redis.Redis, keys: Keys, model: str, record: MeasuredProfile, *, instead_of: bytes | None) -> bool:
    """Writes the record if the one there still is `instead_of` (None: none); returns whether it did."""
    key = keys.measured_profile(model)
    with client.pipeline(transaction=True) as pipeline:
        pipeline.watch(key)
        if cast(Any, pipeline.get(key)) != instead_of:
            return False
        pipeline.multi()
        pipeline.set(key, record.to_json())
        try:
            pipeline.execute()
        except Overtaken:
            return False
    return True


def _factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= _MOST:
        raise WireError(f"{value!r:.40} is no factor")
    return float(value)


def _moment(value: object) -> int | None:
    return None if value is None else checks.count(value)
