"""The phases of a gateway's end, and the times at which they begin after a signal. Pure.

    SIGTERM: LINGERING (linger_s) -> FINISHING (drain_s, from the signal on) -> CUTTING (LAST_WORDS_S) -> GONE
    SIGINT, SIGTERM before the gateway listens, or failed background work: CUTTING (LAST_WORDS_S) -> GONE
    another signal or failure, at any time: GONE

The gateway ends sooner if no request is in flight and it no longer listens.
"""

import signal
from dataclasses import dataclass
from enum import IntEnum

from blockrelay_gateway.policy import LAST_WORDS_S


class Phase(IntEnum):
    """The phases of a gateway. In each it does less than in the one before it."""

    SERVING = 0  # it does everything
    LINGERING = 1  # it still serves, but is not ready, and closes each connection behind an answer
    FINISHING = 2  # it listens no more; open connections go on
    CUTTING = 3  # clients that still wait get a message that says how to read on elsewhere
    GONE = 4  # it waits for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The times at which phases begin, in seconds of a clock that only goes forward."""

    lingering: float
    finishing: float
    cutting: float
    gone: float

    def phase(self, now: float) -> Phase:
        """The phase at the time `now`."""
        return max((phase for at, phase in self._beginnings() if at <= now), default=Phase.SERVING)

    def next_change(self, now: float) -> float | None:
        """The time at which the next phase begins; None in the last one."""
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
    """The course after the signal `number`, or after a failure that only a restart mends (None).

    `now` is the time of the signal, by the clock of the course. After SIGTERM the gateway lingers for `linger_s`
    seconds, and serves its streams until `drain_s` seconds after the signal, if that is later. `started`: the gateway
    listens already. `under_way` is the course of an earlier signal or failure: then this one ends the gateway at once.
    """
    if under_way is not None:
        return Course(lingering=now, finishing=now, cutting=now, gone=now)
    if number != signal.SIGTERM or not started:
        linger_s = drain_s = 0.0
    cutting = now + max(drain_s, linger_s)
    return Course(lingering=now, finishing=now + linger_s, cutting=cutting, gone=cutting + LAST_WORDS_S)
