"""Decides what follows a failure on a device: another try there, the host's next device, or a wait while a CPU stands
in.

Making or running a session is tried again where the failure may pass by itself: if no row of `failures.TABLE` matches.
It is no use to repeat it if the device is lost, hangs or gives wrong numbers, if memory is used up, or if a batch is
refused.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from blockrelay.errors import BlockrelayError, ExecutionError
from blockrelay.observability.logs import get
from blockrelay_worker.execution.onnx.failures import classify

Next = Literal["again", "next_device", "wait"]
#: Reasons of DeviceFailed and DeviceLost with which a device is still there but cannot do its work: another device may.
#: (A device that is lost, hangs or is wrong comes back by itself, later: no other device takes its place.)
CANNOT = frozenset({"unknown", "unknown_twice", "out_of_memory", "device_limit", "refused"})
#: ONNX Runtime's errors for a file that can never become a session.
_NEVER = ("INVALID_GRAPH", "INVALID_PROTOBUF", "NO_SUCHFILE", "NO_MODEL", "NOT_IMPLEMENTED")


@dataclass(frozen=True, slots=True)
class TryLimits:
    """Limits of repeating: at most `max_tries` tries, and no try that is likely to end later than `within_s` seconds
    after the first one began."""

    max_tries: int = 3
    within_s: float = 30.0


TRIES = TryLimits()


def what_next(reason: str, tries: Sequence[float], limits: TryLimits, *, others: bool) -> Next:
    """Decides after a failure with this `reason` (of Failure or DeviceLost). Pure. `tries`: the seconds of each try so
    far; empty where all were made elsewhere. `others`: the host has another device that is free.

    The next try is expected to take as long as the longest one.
    """
    if reason == "unknown" and 0 < len(tries) < limits.max_tries and sum(tries) + max(tries) <= limits.within_s:
        return "again"
    return "next_device" if reason in CANNOT and others else "wait"


def reason_of(error: Exception) -> str:
    """Returns the reason of a failure on a device, from `failures.TABLE`; `unknown` if no row matches, and empty if
    the device is not the cause: another error of ours, or a graph that can never become a session.

    An ExecutionError is judged by its `__cause__`: without one the result is empty.
    """
    cause = error.__cause__ if isinstance(error, ExecutionError) else error
    if cause is None or isinstance(cause, BlockrelayError) or any(text in str(cause) for text in _NEVER):
        return ""
    return "out_of_memory" if isinstance(cause, MemoryError) else classify(str(cause)).reason


class Tries:
    """The tries of one piece of work, which begins at construction. One thread uses it."""

    def __init__(
        self,
        limits: TryLimits,
        counted: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`counted` is called before each try after the first."""
        self._limits, self._counted, self._clock = limits, counted, clock
        self._began, self._seconds = clock(), list[float]()

    def again(self, error: Exception, *, what: str) -> bool:
        """Returns whether the work, which failed with `error`, is to be tried again, and logs that; `what` names it in
        the log. Call it once after each failed try, at once: the time since the last call is that of the try."""
        now = self._clock()
        self._seconds.append(now - self._began)
        self._began = now
        if what_next(reason_of(error), self._seconds, self._limits, others=False) != "again":
            return False
        self._counted()
        get().warning("TRIED_AGAIN", what=what, number=len(self._seconds) + 1, error=str(error.__cause__ or error))
        return True
