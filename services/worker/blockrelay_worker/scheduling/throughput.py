"""How fast this worker is under its present load, measured for the admission of requests. Pure, but for PaceMeter.

Time counts while requests are on the worker, whatever it goes to (steps, commits, waiting for other stages): that is
what a client feels. The time of a window is split between prompt rows and tokens by what was known of them before, and
what was known is corrected by the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from blockrelay.protocol.capabilities import Pace
from blockrelay_worker.scheduling.smoothing import smoothed

#: Requests at once whose times between tokens are kept apart, as upper ends.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 1024)
#: A prompt row costs so many tokens' time before it was measured.
FIRST_ROW_SHARE = 0.2
#: One window tells at most so many times what was known: a machine that paused for a minute is not slow.
MAX_GROWTH = 2
#: Seconds of work after which a window is closed.
WINDOW_S = 0.5
#: Seconds for which as many requests at once as there were are expected again.
RECENT_S = 30.0
#: Seconds without work after which half of what is above the best ever known is forgotten. Who is believed to be slow
#: gets nothing to do, and could never show that it is not.
REST_S = 30.0


@dataclass(frozen=True, slots=True)
class Window:
    """`seconds` of work on `running` requests on average, and the prompt rows and tokens that came of it."""

    seconds: float
    running: float
    rows: int
    tokens: int

    @property
    def size(self) -> int:
        """Of SIZES."""
        return next((s for s in SIZES if self.running <= s), SIZES[-1])


@dataclass(frozen=True, slots=True)
class Measured:
    """Smoothed seconds of a prompt row, and of a token by the number of requests at once (one of SIZES)."""

    row_s: float | None = None
    token_s: Mapping[int, float] = field(default_factory=dict[int, float])


def _smoothed(before: float | None, now: float) -> float:
    return smoothed(before, now, max_growth=MAX_GROWTH)


def observed(known: Measured, window: Window) -> Measured:
    """`known` after a window."""
    if not window.rows and not window.tokens:
        return known
    size = window.size
    token_s = known.token_s.get(size)
    if not window.tokens:
        return replace(known, row_s=_smoothed(known.row_s, window.seconds / window.rows))
    row_s = known.row_s
    if not window.rows:
        return replace(known, token_s={**known.token_s, size: _smoothed(token_s, window.seconds / window.tokens)})
    if row_s is None and token_s is None:
        both = window.seconds / (window.tokens + FIRST_ROW_SHARE * window.rows)
        return Measured(FIRST_ROW_SHARE * both, {**known.token_s, size: both})
    if row_s is None:
        row_s = FIRST_ROW_SHARE * (token_s or 0.0)
    if token_s is None:
        token_s = max(window.seconds - row_s * window.rows, 0.1 * window.seconds) / window.tokens
    # Both are wrong by the same factor, as far as one window tells.
    factor = window.seconds / (row_s * window.rows + token_s * window.tokens)
    return Measured(_smoothed(row_s, row_s * factor), {**known.token_s, size: _smoothed(token_s, token_s * factor)})


def best_of(best: Measured, known: Measured) -> Measured:
    """The faster one in everything."""
    rows = [r for r in (best.row_s, known.row_s) if r is not None]
    token_s = {size: min(s, best.token_s.get(size, s)) for size, s in known.token_s.items()}
    return Measured(min(rows, default=None), token_s)


def rested(known: Measured, best: Measured, idle_s: float) -> Measured:
    """`known` after so long without work: on its way back to `best`."""
    left = 0.5 ** (idle_s / REST_S)
    token_s = {size: best.token_s[size] + (s - best.token_s[size]) * left for size, s in known.token_s.items()}
    row_s = None if known.row_s is None or best.row_s is None else best.row_s + (known.row_s - best.row_s) * left
    return Measured(row_s, token_s)


def pace(known: Measured, *, recent_concurrency: int = 1) -> Pace | None:
    """What to tell; `recent_concurrency`: the most requests at once lately, of SIZES. None before any token."""
    if not known.token_s:
        return None
    row_s = FIRST_ROW_SHARE * known.token_s[max(known.token_s)] if known.row_s is None else known.row_s
    return Pace(row_s, {size: token_s * size for size, token_s in known.token_s.items()}, recent_concurrency)


class PaceMeter:
    """Collects windows. The engine thread calls `look` and `add`; `told` may be called by any thread."""

    def __init__(self) -> None:
        self._measured = self._best = Measured()
        self._seen: dict[int, float] = {}  # size: the last window with so many at once
        self._at: float | None = None
        self._worked = float("-inf")  # until when
        self._seconds = self._weighted = 0.0
        self._running = self._rows = self._tokens = 0

    def told(self, now: float) -> Pace | None:
        """The pace at the moment `now` (monotonic seconds)."""
        idle_s = now - self._worked if self._at is None else 0.0
        recent_concurrency = max((size for size, at in self._seen.copy().items() if now - at < RECENT_S), default=1)
        return pace(rested(self._measured, self._best, idle_s), recent_concurrency=recent_concurrency)

    def look(self, now: float, running: int) -> None:
        """Once a round: `running` requests are on this worker from `now` (monotonic seconds) to the next look."""
        if self._at is not None:
            self._seconds += now - self._at
            self._weighted += (now - self._at) * self._running
            self._worked = now
        elif running:
            self._measured = rested(self._measured, self._best, now - self._worked)
        self._at = now if running else None
        self._running = running
        if self._seconds >= WINDOW_S:
            window = Window(self._seconds, self._weighted / self._seconds, self._rows, self._tokens)
            known = observed(self._measured, window)
            self._best = best_of(self._best, known)  # before: `told` looks up in it all that is measured
            self._measured = known
            self._seen[window.size] = now
            self._seconds = self._weighted = 0.0
            self._rows = self._tokens = 0

    def add(self, *, rows: int, tokens: int) -> None:
        """A step has computed prompt rows, and rows that give tokens."""
        self._rows += rows
        self._tokens += tokens
