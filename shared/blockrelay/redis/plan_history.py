"""The plans that a model was given, `plan-history:<model>`: the newest is the one that schedulers bring into force.

An entry comes from the settings of a scheduler, when they differ from those of the entry before that came from
settings, or from `blockrelay plan apply` and `plan rollback`. So a scheduler that is only started again leaves an
applied plan in force, and one that was given another plan changes it.
"""

import getpass
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import redis

from blockrelay.errors import RedisRefused, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.planned_split import PlannedSplit, parse_planned
from blockrelay.redis.errors import Overtaken

#: Entries that are kept of a model.
KEPT = 100
Origin = Literal["settings", "apply", "rollback"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """One plan. `who` gave it: a scheduler's name, or USER@HOST. `id` is its place in the history."""

    id: str
    planned: PlannedSplit
    origin: Origin
    who: str

    @property
    def at_ms(self) -> int:
        """Unix time, of Redis' clock."""
        return int(self.id.partition("-")[0])

    @property
    def source(self) -> str:
        """For people: where the plan comes from."""
        return {"settings": "settings of", "apply": "applied by", "rollback": "rolled back by"}[self.origin] + (
            f" {self.who}"
        )


def read_history(client: redis.Redis, keys: Keys, model: str, count: int = KEPT) -> list[PlanEntry]:
    """The newest `count` entries, newest first. Raises RedisRefused for an entry that is none."""
    return [
        _entry(found, fields) for found, fields in cast(Any, client.xrevrange(keys.plan_history(model), count=count))
    ]


def newest(found: list[tuple[bytes, Mapping[bytes, bytes]]]) -> PlanEntry | None:
    """Of what `XREVRANGE plan-history:<model> + - COUNT 1` answered. Raises RedisRefused for an entry that is none."""
    return _entry(*found[0]) if found else None


def append(
    client: redis.Redis, keys: Keys, model: str, planned: PlannedSplit, *, origin: Origin, who: str, behind: str
) -> PlanEntry | None:
    """A new entry behind that of the id `behind`, which was the newest ("": there was none). None when another has
    come meanwhile."""
    key = keys.plan_history(model)
    with client.pipeline(transaction=True) as together:
        together.watch(key)
        found = cast(Any, together.xrevrange(key, count=1))
        if (found[0][0].decode() if found else "") != behind:
            return None
        together.multi()
        fields: Any = {"plan": planned.to_json(), "origin": origin, "who": who}
        together.xadd(key, fields, maxlen=KEPT, approximate=False)
        try:
            (added,) = together.execute()
        except Overtaken:
            return None
    return PlanEntry(id=added.decode(), planned=planned, origin=origin, who=who)


def this_person() -> str:
    """USER@HOST of who runs this process; the number of a user whom the system does not know, as in containers."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(getattr(os, "getuid", lambda: "?")())  # Windows has none
    return f"{user}@{socket.gethostname()}"


def _entry(found: bytes, fields: Mapping[bytes, bytes]) -> PlanEntry:
    where, origin = f"entry {found.decode()} of the plan history", fields.get(b"origin", b"").decode(errors="replace")
    try:
        if origin not in get_args(Origin):
            raise UsageError(f"{where} has no origin that is known")
        planned = parse_planned(fields.get(b"plan", b""), where)
    except UsageError as error:
        raise RedisRefused(f"{error}; remove it with XDEL", code="PLAN") from None
    who = fields.get(b"who", b"").decode(errors="replace")
    return PlanEntry(id=found.decode(), planned=planned, origin=cast(Origin, origin), who=who)
