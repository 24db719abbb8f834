"""Draws the faults of a drill and their times in advance, so that a seed determines all of them. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Literal, TypeVar, get_args

from blockrelay.errors import UsageError
from blockrelay.protocol.plan import Stage, split_text, stages_of

T = TypeVar("T", bound=str)
#: The faults. kill: SIGKILL. stop: SIGSTOP, later SIGCONT. full: Redis has no room (maxmemory 1). cut: Redis closes
#: connections. replan: a plan with other borders between the same number of stages. precision: all workers change to
#: another block folder. degrade: memory lacks when a killed worker starts again. swap: KV pages are few, and those on
#: the disk are damaged. rank: workers share their stages with other processes, and one of those is killed. The last
#: five hurt no role.
Kind = Literal["kill", "stop", "full", "cut", "replan", "precision", "degrade", "swap", "rank"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CHANGES: tuple[Kind, ...] = ("replan", "precision", "degrade", "swap", "rank")
#: Faults that happen unless others are asked for: few KV pages, and ranks on few cores, slow a whole drill down.
BY_DEFAULT: tuple[Kind, ...] = ("kill", "stop", "full", "cut", "replan", "precision", "degrade")
#: The roles that a user can choose; `redis` is both servers, `device` the process of a GPU or of ONNX blocks.
Role = Literal["worker", "scheduler", "gateway", "redis", "device"]
ROLES: tuple[Role, ...] = get_args(Role)
#: The role of the process that a fault hurts.
Target = Literal["worker", "scheduler", "gateway", "device", "redis-control", "redis-payload"]
SERVERS: tuple[Target, ...] = ("redis-control", "redis-payload")
#: Shortest and longest duration of a fault in seconds, below and above the time after which a process counts as dead.
LASTS_S: dict[Kind, tuple[float, float]] = {"stop": (0.3, 8.0), "full": (0.2, 3.0)}
#: Share of cuts that close all connections of a server instead of one.
CUT_ALL = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault that will happen."""

    after_s: float
    """Seconds after the previous fault."""
    kind: Kind
    target: Target
    pick: float
    """A number in [0, 1) that chooses among the processes (or connections) at that time."""
    lasts_s: float = 0.0
    """Duration in seconds; 0 for a kill and a cut."""
    everybody: bool = False
    """True for a cut of all connections instead of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that has happened."""

    at: float
    """Time on the monotonic clock, in seconds."""
    kind: Kind | Literal["drain"]
    """A kind of fault, or drain: an upgrade told a worker to end."""
    target: Target
    requests: frozenset[str] | None = None
    """Ids (inside the cell) of the requests on the worker, or on the worker of the device.

    None: unknown, or another target.
    """


def strikes(rng: Random, *, kinds: Sequence[Kind], roles: Sequence[Role], every_s: float) -> Iterator[Strike]:
    """Yields faults without end, `every_s` seconds apart on average; the kind is drawn first, then the target.

    `possible(kinds, roles)` must not be empty.
    """
    hurt = possible(kinds, roles)
    while True:
        kind = rng.choice(list(hurt))
        role = rng.choice(hurt[kind])
        min_s, max_s = LASTS_S.get(kind, (0.0, 0.0))
        yield Strike(
            after_s=every_s * rng.uniform(0.5, 1.5),
            kind=kind,
            target=rng.choice(SERVERS) if role == "redis" else role,
            pick=rng.random(),
            lasts_s=rng.uniform(min_s, max_s),
            everybody=kind == "cut" and rng.random() < CUT_ALL,
        )


def possible(kinds: Sequence[Kind], roles: Sequence[Role]) -> dict[Kind, list[Role]]:
    """Returns the roles that each kind of fault can hurt: only a Redis can be full or cut connections.

    Kinds that can hurt none of `roles` are absent, such as CHANGES.
    """
    servers: list[Role] = ["redis"] if "redis" in roles else []
    hurting: list[Kind] = [kind for kind in KINDS if kind in kinds and kind not in CHANGES]
    by_kind: dict[Kind, list[Role]] = {k: servers if k in ("full", "cut") else list(roles) for k in hurting}
    return {kind: hurt for kind, hurt in by_kind.items() if hurt}


def other_borders(rng: Random, blocks: int, stages: int, before: str) -> tuple[Stage, ...]:
    """Draws stages of at least one block each whose text is not `before`; there must be other ones."""
    while True:
        ends = [0, *sorted(rng.sample(range(1, blocks), stages - 1)), blocks]
        drawn = stages_of([b - a for a, b in pairwise(ends)])
        if split_text(drawn) != before:
            return drawn


def parse_names(text: str, option: str, known: Sequence[T]) -> tuple[T, ...]:
    """Returns the ones of `known` in the text of an option such as `kill,stop`, in the order of `known`.

    Raises UsageError for any other name.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"{option} takes {', '.join(known)} with commas between them, not {name!r}")
    return tuple(one for one in known if one in names)
