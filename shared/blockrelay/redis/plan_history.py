"""The history of a model's plans, in `plan-history:<model>`. Schedulers put the newest entry into force.

`blockrelay plan apply` and `plan rollback` add entries. A scheduler adds one when its settings differ from the last
entry that came from settings. So a scheduler that only restarts keeps an applied plan, and one that starts with another
plan replaces it. It also adds one when it moves borders by measured times, and when memory decides about the precision.
`blockrelay precision set` adds one with another block folder. All functions with a client raise RedisTrouble.
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

#: Entries kept for each model.
KEPT = 100
Origin = Literal["settings", "apply", "rollback", "measured", "precision", "degraded", "restored"]
#: The origins of changes that schedulers make because of memory.
MEMORY: tuple[Origin, ...] = ("degraded", "restored")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """One plan of the history."""

    id: str  # of the stream entry
    planned: PlannedSplit
    origin: Origin
    who: str  # its author: a scheduler's name, or USER@HOST

    @property
    def at_ms(self) -> int:
        """The time when it was added, by Redis' clock (Unix milliseconds)."""
        return int(self.id.partition("-")[0])

    @property
    def source(self) -> str:
        """The origin and author of the plan, in words."""
        words: Mapping[Origin, str] = {
            "settings": "settings of",
            "apply": "applied by",
            "rollback": "rolled back by",
            "measured": "measured by",
            "precision": "precision set by",
            "degraded": "degraded by",
            "restored": "restored by",
        }
        return f"{words[self.origin]} {self.who}"


def read_history(client: redis.Redis, keys: Keys, model: str) -> list[PlanEntry]:
    """Returns all entries, newest first. Raises RedisRefused for an entry that cannot be read."""
    entries = cast(Any, client.xrevrange(keys.plan_history(model), count=KEPT))
    return [_entry(keys.plan_history(model), entry_id, fields) for entry_id, fields in entries]


def newest(keys: Keys, model: str, answer: list[tuple[bytes, Mapping[bytes, bytes]]]) -> PlanEntry | None:
    """Returns the entry in the answer of `XREVRANGE plan-history:<model> + - COUNT 1`; None if there is none.

    Raises RedisRefused for an entry that cannot be read.
    """
    return _entry(keys.plan_history(model), *answer[0]) if answer else None


def append(
    client: redis.Redis, keys: Keys, model: str, planned: PlannedSplit, *, origin: Origin, who: str, behind: str
) -> PlanEntry | None:
    """Adds an entry by the author `who` if the newest one still has the id `behind` ("": there is none); returns it.

    Returns None if another entry was added meanwhile.
    """
    key = keys.plan_history(model)
    with client.pipeline(transaction=True) as pipeline:
        pipeline.watch(key)
        last = cast(Any, pipeline.xrevrange(key, count=1))
        if (last[0][0].decode() if last else "") != behind:
            return None
        pipeline.multi()
        fields: Any = {"plan": planned.to_json(), "origin": origin, "who": who}
        pipeline.xadd(key, fields, maxlen=KEPT, approximate=False)
        try:
            (added,) = pipeline.execute()
        except Overtaken:
            return None
    return PlanEntry(id=added.decode(), planned=planned, origin=origin, who=who)


def this_person() -> str:
    """Returns USER@HOST of this process. USER is a number if the system has no name for it, as in some containers."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(getattr(os, "getuid", lambda: "?")())  # Windows has none
    return f"{user}@{socket.gethostname()}"


def _entry(key: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> PlanEntry:
    where = f"entry {entry_id.decode()} of the plan history ({key})"
    origin = fields.get(b"origin", b"").decode(errors="replace")
    try:
        if origin not in get_args(Origin):
            raise UsageError(f"{where} has no known origin")
        planned = parse_planned(fields.get(b"plan", b""), where)
    except UsageError as error:
        raise RedisRefused(f"{error}; remove it with XDEL", code="PLAN") from None
    who = fields.get(b"who", b"").decode(errors="replace")
    return PlanEntry(id=entry_id.decode(), planned=planned, origin=cast(Origin, origin), who=who)
