"""What follows a failure on a device: another try there, the next device of the host, or the CPU that stands in.

Making a session and running it are tried again where the failure may pass by itself: one that no row of
`failures.TABLE` knows. Repeating helps nobody whose device is lost, hangs or gives wrong numbers, nor where memory is
used up or a batch is refused.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from blockrelay.errors import BlockrelayError, ExecutionError
from blockrelay.observability.logs import get
from blockrelay_worker.execution.onnx.failures import judged

Next = Literal["again", "next_device", "wait"]
#: What DeviceFailed and DeviceLost call failures of a device that is still there, and cannot do its work: another one
#: may. (A device that is lost, hangs or is wrong comes back by itself, later: nothing else takes its place.)
CANNOT = frozenset({"unknown", "unknown_twice", "out_of_memory", "device_limit", "refused"})
#: What ONNX Runtime says of a file that it will never make a session of.
_NEVER = ("INVALID_GRAPH", "INVALID_PROTOBUF", "NO_SUCHFILE", "NO_MODEL", "NOT_IMPLEMENTED")


@dataclass(frozen=True, slots=True)
class TryLimits:
    """A piece of work is tried `most` times, and no try begins that is likely to end beyond `within_s` behind the
    beginning of the first."""

    most: int = 3
    within_s: float = 30.0


TRIES = TryLimits()


def what_next(reason: str, tries: Sequence[float], limits: TryLimits, *, others: bool) -> Next:
    """Pure. `reason` as of Failure or DeviceLost, `tries` the seconds that each one took, or none where all were made
    elsewhere; `others`: a device of the host is left that nobody uses.

    The next try is expected to take as long as the longest one.
    """
    if reason == "unknown" and 0 < len(tries) < limits.most and sum(tries) + max(tries) <= limits.within_s:
        return "again"
    return "next_device" if reason in CANNOT and others else "wait"


def reason_of(error: Exception) -> str:
    """Of a failure on a device, by the name of its row in `failures.TABLE`; empty: the device has nothing to do with
    it."""
    cause = error.__cause__ if isinstance(error, ExecutionError) else error
    if cause is None or isinstance(cause, BlockrelayError) or any(text in str(cause) for text in _NEVER):
        return ""
    return "out_of_memory" if isinstance(cause, MemoryError) else judged(str(cause)).reason


class Tries:
    """Those of one piece of work, which begins when this is made. One thread uses it."""

    def __init__(
        self,
        limits: TryLimits,
        counted: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`counted` is called before each try behind the first."""
        self._limits, self._counted, self._clock = limits, counted, clock
        self._began, self._seconds = clock(), list[float]()

    def again(self, error: Exception, *, what: str) -> bool:
        """Whether the work, which failed by `error`, is tried again; `what` it is stands in the log."""
        now = self._clock()
        self._seconds.append(now - self._began)
        self._began = now
        if what_next(reason_of(error), self._seconds, self._limits, others=False) != "again":
            return False
        self._counted()
        get().warning("TRIED_AGAIN", what=what, number=len(self._seconds) + 1, error=str(error.__cause__ or error))
        return True
