"""Failure points: named places before and after each external effect where a process can be made to fail, for tests.

    BLOCKRELAY_FAILPOINT=worker.after_commit:kill@3,scheduler.before_plan:delay=0.5

The setting has entries `<point>:<action>[=<seconds>][@<passage>]`, separated by commas. In each process of the point's
role an action happens once, at that passage of the point (counted from 1, the default). Without the setting `reach`
only checks an empty dictionary.

    kill    SIGKILL to this process
    stop    SIGSTOP to this process, until it gets SIGCONT
    raise   an error, mostly that Redis is lost: before = the command did not run, after = it ran, but its reply was
            lost; around compute the batch fails
    delay   this thread sleeps for <seconds>

`worker.before_compute:kill#77` happens every time token 77 is among those computed, which makes a request that kills
every worker it comes to.

The points `before_<script>` and `after_<script>` are around each call of a script (`blockrelay.redis.client`); the
others are single calls of `reach` at the effect.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from blockrelay.errors import ExecutionError, RedisUnavailable, UsageError
from blockrelay.observability.logs import get
from blockrelay.protocol.keys import SCRIPTS_OF

Role = Literal["gateway", "scheduler", "worker", "launcher"]
Action = Literal["kill", "stop", "raise", "delay"]

#: Points that are calls of `reach`, in the order in which a request passes them.
Line = Literal[
    "gateway.before_read",
    "gateway.after_read",
    "gateway.before_event",
    "gateway.after_event",
    "worker.before_register",
    "worker.after_register",
    "worker.before_announce",
    "worker.after_announce",
    "worker.after_receive",
    "worker.before_page_get",
    "worker.after_page_get",
    "worker.before_compute",
    "worker.after_compute",
    "worker.before_page_put",
    "worker.after_page_put",
    "worker.before_forward",
    "worker.after_forward",
    "worker.before_early_job",
    "worker.after_early_job",
    "worker.before_result",
    "worker.after_result",
    "launcher.before_spawn",
    "launcher.after_spawn",
]
#: Exceptions that `raise` raises at effects without Redis; None where there is no failure to raise.
_OTHER_FAILURES: dict[str, type[Exception] | None] = {
    "compute": ExecutionError,
    "page_put": None,
    "page_get": None,
    "event": None,
    "spawn": None,
}
#: Scripts that each role calls. SCRIPTS_OF leaves out the launcher, which has the rights of an administrator.
SCRIPTS: dict[str, tuple[str, ...]] = {
    **{role: tuple(name.lower() for name in names) for role, names in SCRIPTS_OF.items()},
    "launcher": ("dead",),
}
POINTS: tuple[str, ...] = (
    *get_args(Line),
    *(f"{role}.{m}_{script}" for role, names in SCRIPTS.items() for script in names for m in ("before", "after")),
)
#: Exception that `raise` raises at each point; None where it has no failure.
FAILURES = {point: _OTHER_FAILURES.get(point.split("_", 1)[1], RedisUnavailable) for point in POINTS}
#: Points that get the computed tokens, so that `#<token>` works there.
WITH_TOKENS = ("worker.before_compute",)
_TRAP = re.compile(r"([a-z_.]+):([a-z]+)(?:=([0-9.]+))?(?:@([0-9]+)|#([0-9]+))?")


@dataclass(frozen=True, slots=True)
class Trap:
    """One entry of the setting: an action at a point."""

    point: str
    action: Action
    seconds: float  # of a delay
    passage: int  # the passage of the point at which the action happens, from 1
    token: int | None = None  # instead of `passage`: the action happens at each passage with this token

    def springs(self, passage: int, tokens: Iterable[int]) -> bool:
        """Returns whether the action happens at this passage, with these tokens."""
        return passage == self.passage if self.token is None else self.token in tokens


def parse(text: str) -> tuple[Trap, ...]:
    """Returns the entries of the setting BLOCKRELAY_FAILPOINT, for all roles; none for an empty one.

    Raises ValueError for a wrong entry. For an unknown point or action its message lists those there are.
    """
    return tuple(_trap(part.strip()) for part in text.split(",")) if text.strip() else ()


def _trap(text: str) -> Trap:
    match = _TRAP.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not <point>:<action>[=<seconds>][@<passage>] nor ...[#<token>]")
    point, action, seconds, passage, token = match.groups()
    if point not in POINTS:
        raise ValueError(f"there is no point {point!r}; points are {', '.join(sorted(POINTS))}")
    if action not in get_args(Action):
        raise ValueError(f"there is no action {action!r}; actions are {', '.join(get_args(Action))}")
    if (action == "delay") != (seconds is not None):
        raise ValueError(f"{text!r}: delay, and only delay, takes =<seconds>")
    if action == "raise" and FAILURES[point] is None:
        raise ValueError(f"{point!r} has no failure to raise")
    if passage == "0":
        raise ValueError(f"{text!r}: passages count from 1")
    if token and point not in WITH_TOKENS:
        raise ValueError(f"tokens are not known at {point!r}, only at {', '.join(WITH_TOKENS)}")
    return Trap(point, cast(Action, action), float(seconds or 0), int(passage or 1), int(token) if token else None)


class _Armed:
    """The traps of this process, by their point, and the number of passages of each point."""

    def __init__(self) -> None:
        self.role: Role | None = None
        self.traps: dict[str, list[Trap]] = {}
        self.passed: dict[str, int] = {}
        self.lock = threading.Lock()


_armed = _Armed()


def arm(role: Role, setting: str) -> None:
    """Sets the traps of `role` in this process; call it once, in `__main__`. Raises UsageError for a wrong setting."""
    try:
        traps = [trap for trap in parse(setting) if trap.point.startswith(f"{role}.")]
    except ValueError as error:
        raise UsageError(f"BLOCKRELAY_FAILPOINT: {error}") from None
    _armed.role, _armed.traps, _armed.passed = role, {}, {}
    for trap in traps:
        _armed.traps.setdefault(trap.point, []).append(trap)


def reach(point: Line, tokens: Iterable[int] = ()) -> None:
    """Passes `point`: runs the actions that are set for it. `tokens` are the token ids of the batch, for `#<token>`.

    Raises the exception in FAILURES for the action `raise`, and UsageError on Windows for any action.
    """
    if _armed.traps:
        _pass(point, frozenset(tokens))


def reach_script(moment: Literal["before", "after"], script: str) -> None:
    """Passes this role's point before or after a call of `script`, a name such as `commit`. Raises as `reach` does."""
    if _armed.traps:
        _pass(f"{_armed.role}.{moment}_{script}")


def _pass(point: str, tokens: frozenset[int] = frozenset()) -> None:
    assert point in POINTS, f"{point} is missing in POINTS"
    with _armed.lock:
        passage = _armed.passed[point] = _armed.passed.get(point, 0) + 1
    _spring([trap for trap in _armed.traps.get(point, ()) if trap.springs(passage, tokens)])


def _spring(traps: Sequence[Trap]) -> None:
    for trap in traps:
        get().warning("FAILPOINT", point=trap.point, action=trap.action, passage=trap.passage)
        if sys.platform == "win32":
            raise UsageError("failure points need signals, which Windows does not have")
        if trap.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif trap.action == "stop":
            # Sent to this thread: if another thread took the signal, this one would run on past the point for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif trap.action == "delay":
            time.sleep(trap.seconds)
        else:
            failure = FAILURES[trap.point]
            assert failure is not None, "parse() refuses it"
            raise failure(f"failpoint {trap.point}")
