"""What a drill does to its system, and when: drawn before it happens, so that a seed tells all of it. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from blockrelay.errors import UsageError

#: kill: SIGKILL. stop: SIGSTOP, SIGCONT later. full: a Redis without room (maxmemory 1). cut: a Redis ends connections.
Kind = Literal["kill", "stop", "full", "cut"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Of these a user chooses; `redis` is both servers, `device` the process of a GPU.
Role = Literal["worker", "scheduler", "gateway", "redis", "device"]
ROLES: tuple[Role, ...] = get_args(Role)
#: Whose process it is.
Target = Literal["worker", "scheduler", "gateway", "device", "redis-control", "redis-payload"]
SERVERS: tuple[Target, ...] = ("redis-control", "redis-payload")
#: How long a process sleeps and a Redis is full, in seconds: shorter and longer than it takes to be declared dead.
LASTS_S: dict[Kind, tuple[float, float]] = {"stop": (0.3, 8.0), "full": (0.2, 3.0)}
#: The share of cuts that concern every connection of a server, not one.
CUT_ALL = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault to come, `after_s` seconds behind the one before. `pick` in [0, 1) chooses among the processes (or the
    connections) that there are then; `everybody`: not one connection but all."""

    after_s: float
    kind: Kind
    target: Target
    pick: float
    lasts_s: float = 0.0
    everybody: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happened at `at` (monotonic), for `lasts_s`. `requests`: those on that worker, None where nobody knows.

    drain: a worker was told to end, by an upgrade.
    """

    at: float
    kind: Kind | Literal["drain"]
    target: Target
    lasts_s: float = 0.0
    requests: frozenset[str] | None = None


def strikes(rng: Random, *, kinds: Sequence[Kind], roles: Sequence[Role], every_s: float) -> Iterator[Strike]:
    """For ever, `every_s` apart on average; a kind is drawn first. `possible(kinds, roles)` is not empty."""
    hurt = possible(kinds, roles)
    while True:
        kind = rng.choice(list(hurt))
        role = rng.choice(hurt[kind])
        least, most = LASTS_S.get(kind, (0.0, 0.0))
        yield Strike(
            after_s=every_s * rng.uniform(0.5, 1.5),
            kind=kind,
            target=rng.choice(SERVERS) if role == "redis" else role,
            pick=rng.random(),
            lasts_s=rng.uniform(least, most),
            everybody=kind == "cut" and rng.random() < CUT_ALL,
        )


def possible(kinds: Sequence[Kind], roles: Sequence[Role]) -> dict[Kind, list[Role]]:
    """Who may meet which of the kinds: only a Redis is full or cuts connections."""
    servers: list[Role] = ["redis"] if "redis" in roles else []
    found: dict[Kind, list[Role]] = {k: servers if k in ("full", "cut") else list(roles) for k in KINDS if k in kinds}
    return {kind: hurt for kind, hurt in found.items() if hurt}


def parse_roles(text: str) -> tuple[Role, ...]:
    """`worker,redis` as roles; none for an empty text. Raises UsageError."""
    names = _names(text, "--kill", ROLES)
    return tuple(role for role in ROLES if role in names)


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """`kill,stop` as kinds; none for an empty text. Raises UsageError."""
    names = _names(text, "--faults", KINDS)
    return tuple(kind for kind in KINDS if kind in names)


def _names(text: str, option: str, known: Sequence[str]) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"{option} takes {', '.join(known)} with commas between them, not {name!r}")
    return names
