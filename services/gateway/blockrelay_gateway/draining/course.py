"""The end of a gateway, from the signal on: what it still does, and until when. Pure.

    SIGTERM: LINGERING (linger_s) -> FINISHING (drain_s, from the signal on) -> CUTTING (LAST_WORDS_S) -> GONE
    SIGINT, or SIGTERM before anybody could ask anything: CUTTING (LAST_WORDS_S) -> GONE
    another signal, at any time: GONE

It ends sooner when nothing is under way any more and nobody listens.
"""

import signal
from dataclasses import dataclass
from enum import IntEnum

#: Seconds that clients have to read how their requests go on.
LAST_WORDS_S = 5.0


class Phase(IntEnum):
    """What a gateway does. Each phase does less than the one before it."""

    SERVING = 0  # everything
    LINGERING = 1  # the same, but it is not ready, and keeps no connection behind an answer
    FINISHING = 2  # it listens no more; what is under way goes on
    CUTTING = 3  # whoever still waits is told where the request goes on
    GONE = 4  # nothing is waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The times at which phases begin, in seconds of a clock that only goes forward."""

    lingering: float
    finishing: float
    cutting: float
    gone: float

    def phase(self, now: float) -> Phase:
        """The phase at a time."""
        return max((phase for at, phase in self._beginnings() if at <= now), default=Phase.SERVING)

    def next_change(self, now: float) -> float | None:
        """When the next phase begins; None behind the last one."""
        return min((at for at, _ in self._beginnings() if at > now), default=None)

    def _beginnings(self) -> tuple[tuple[float, Phase], ...]:
        return (
            (self.lingering, Phase.LINGERING),
            (self.finishing, Phase.FINISHING),
            (self.cutting, Phase.CUTTING),
            (self.gone, Phase.GONE),
        )


def course_from(
    number: int | None,
    now: float,
    *,
    linger_s: float,
    drain_s: float,
    started: bool = True,
    under_way: Course | None = None,
) -> Course:
    """The course from a signal on, or from what only a restart mends (None). `started`: whether the gateway listens;
    `under_way`: the course that it is on."""
    if under_way is not None:
        return Course(lingering=now, finishing=now, cutting=now, gone=now)
    if number != signal.SIGTERM or not started:
        linger_s = drain_s = 0.0
    cutting = now + max(drain_s, linger_s)
    return Course(lingering=now, finishing=now + linger_s, cutting=cutting, gone=cutting + LAST_WORDS_S)
