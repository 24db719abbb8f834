"""Simulated time, and simulated hosts whose processes take turns on their cores."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Then = Callable[[], None]
#: Seconds that count as zero, because of rounding; and the shortest turn of a process on a core.
_NOTHING_S, _LEAST_TURN_S = 1e-9, 1e-6


class Clock:
    """Runs events in order of time, and those of one time in the order of their addition. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._count = 0

    def at(self, time: float, then: Then) -> None:
        """Adds an event: `then` is called at `time`, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._events, (max(time, self.now), self._count, then))

    def after(self, seconds: float, then: Then) -> None:
        """Adds an event: `then` is called after `seconds`."""
        self.at(self.now + seconds, then)

    def run(self, until: float) -> None:
        """Runs all events up to `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, then = heapq.heappop(self._events)
            then()
        self.now = until


@dataclass(slots=True, eq=False)
class _Turn:
    """Work of one process."""

    left: float
    """Seconds that remain of it, if the process were alone on the host."""
    then: Then
    had: float = 0.0
    """Seconds that the process has had its core without a break."""


class Host:
    """A host whose processes compute at the same time, each on a core.

    A process that finds no free core waits in a queue. A process gives its core away when it sleeps, or when it has had
    the core for `turn_s` and another waits. The host has as many cores as `speeds` has entries. `speeds[k - 1]` is the
    work that k processes do together in a second, in seconds of one that is alone: [1, 2] are two whole cores, and
    [1, 1.3] two threads of one.
    """

    def __init__(self, clock: Clock, speeds: Sequence[float], turn_s: float = 0.0) -> None:
        self._clock, self._speeds, self._turn_s = clock, tuple(speeds), max(turn_s, _LEAST_TURN_S)
        self._computing: list[_Turn] = []
        self._waiting: deque[_Turn] = deque()
        self._goes_on: float | None = None  # `had` of the process that has just ended, which may go on on its core
        self._looked = 0.0  # the time up to which `left` and `had` are right
        self._round = 0  # numbers the plans, so that an event of an older plan does nothing

    def wait(self, waits: Sequence[float], then: Then) -> None:
        """Calls `then` after waits[k] seconds, where k is the number of processes with something to compute now."""
        busy = len(self._computing) + len(self._waiting)
        self._clock.after(waits[min(busy, len(waits) - 1)], then)

    def compute(self, seconds: float, then: Then) -> None:
        """Computes work that takes a process `seconds` alone, and then calls `then`, which may go on computing."""
        self._advance()
        turn = _Turn(seconds, then)
        if self._goes_on is not None:
            turn.had, self._goes_on = self._goes_on, None
            self._computing.append(turn)
        else:
            self._waiting.append(turn)
        self._plan()

    def _advance(self) -> None:
        passed, self._looked = self._clock.now - self._looked, self._clock.now
        for turn in self._computing:
            turn.left -= passed * self._rate()
            turn.had += passed

    def _rate(self) -> float:
        computing = len(self._computing)
        return self._speeds[computing - 1] / computing

    def _plan(self) -> None:
        """Gives free cores to waiting processes, and plans an event for the next moment at which something changes."""
        places = len(self._speeds) - (self._goes_on is not None)
        while self._waiting and len(self._computing) < places:
            self._computing.append(self._waiting.popleft())
        self._round += 1
        if self._computing:
            planned = self._round
            soon = max(0.0, min(turn.left for turn in self._computing)) / self._rate()
            if self._waiting:
                soon = min(soon, *(max(0.0, self._turn_s - turn.had) for turn in self._computing))
            self._clock.after(soon, lambda: self._ring(planned))

    def _ring(self, planned: int) -> None:
        """Handles an event of `_plan`: work has ended, or a process has had its core long enough."""
        if planned != self._round:
            return  # a process has come or gone since
        self._advance()
        first = min(self._computing, key=lambda turn: turn.left)
        if first.left <= _NOTHING_S:
            self._computing.remove(first)
            self._goes_on = first.had
            first.then()
            self._goes_on = None
            self._advance()
        else:
            longest = max(self._computing, key=lambda turn: turn.had)
            if self._waiting and longest.had >= self._turn_s - _NOTHING_S:
                self._computing.remove(longest)
                longest.had = 0.0
                self._computing.append(self._waiting.popleft())
                self._waiting.append(longest)
        self._plan()


class Process:
    """One thread of a host, which does one thing after the other. `work_s` is the sum of their seconds."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._waiting: list[tuple[float, Then]] = []
        self._busy = False
        self.work_s = 0.0

    def do(self, seconds: float, then: Then) -> None:
        """Queues work of `seconds`; `then` is called when it and everything queued before it is done."""
        self._waiting.append((seconds, then))
        self._next()

    def _next(self) -> None:
        """Begins the next work if the process is free."""
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
