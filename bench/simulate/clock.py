"""Simulated time, and hosts whose processes share its cores."""

import heapq
from collections.abc import Callable, Sequence

Then = Callable[[], None]


class Clock:
    """Events in order of time, those of one time in the order in which they came. `now` in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._count = 0

    def at(self, time: float, then: Then) -> None:
        """`then` happens at `time`, which is not over."""
        self._count += 1
        heapq.heappush(self._events, (max(time, self.now), self._count, then))

    def after(self, seconds: float, then: Then) -> None:
        """`then` happens so much later."""
        self.at(self.now + seconds, then)

    def run(self, until: float) -> None:
        """All events up to `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, then = heapq.heappop(self._events)
            then()
        self.now = until


class Host:
    """Processes that compute at the same time share its cores equally.

    `speeds[k - 1]` is what k of them get done together, in seconds of one that is alone: [1, 2] are two whole cores,
    [1, 1.3] two threads of one. More than it has entries get no more done.
    """

    def __init__(self, clock: Clock, speeds: Sequence[float]) -> None:
        self._clock, self._speeds = clock, tuple(speeds)
        self._served = 0.0  # seconds of work that each process has got since the beginning
        self._looked = 0.0
        self._due: list[tuple[float, int, Then]] = []
        self._round = 0

    def wake(self, waits: Sequence[float], then: Then) -> None:
        """A process that sleeps has a core behind waits[k] seconds, where k of the host compute at this moment."""
        self._clock.after(waits[min(len(self._due), len(waits) - 1)], then)

    def compute(self, seconds: float, then: Then) -> None:
        """One process computes what takes it `seconds` alone, and then goes on with `then`."""
        self._advance()
        self._round += 1
        heapq.heappush(self._due, (self._served + seconds, self._round, then))
        self._plan()

    def _advance(self) -> None:
        passed = self._clock.now - self._looked
        if self._due:
            self._served += passed * self._rate()
        self._looked = self._clock.now

    def _rate(self) -> float:
        computing = len(self._due)
        return self._speeds[min(computing, len(self._speeds)) - 1] / computing

    def _plan(self) -> None:
        if self._due:
            self._round += 1
            planned = self._round
            self._clock.after(max(0.0, self._due[0][0] - self._served) / self._rate(), lambda: self._ring(planned))

    def _ring(self, planned: int) -> None:
        if planned != self._round:
            return  # somebody has come or gone since
        self._advance()
        _, _, then = heapq.heappop(self._due)
        self._plan()
        then()


class Process:
    """One thread that does one thing after the other on its host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._waiting: list[tuple[float, Then]] = []
        self._busy = False
        self.work_s = 0.0

    def wake(self, waits: Sequence[float], then: Then) -> None:
        """As `Host.wake`."""
        self._host.wake(waits, then)

    def do(self, seconds: float, then: Then) -> None:
        """`then` happens behind all that it has to do already, and this."""
        self._waiting.append((seconds, then))
        self._next()

    def _next(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy = True
        seconds, then = self._waiting.pop(0)
        self.work_s += seconds

        def done() -> None:
            self._busy = False
            then()
            self._next()

        self._host.compute(seconds, done)
