"""How fast this worker is under its present load, measured for the admission of requests. Pure, but for PaceMeter.

Time counts while requests are on the worker, whatever it goes to (steps, commits, waiting for other stages): that is
what a client feels. The time of a window is split between prompt rows and tokens by what was known of them before, and
what was known is corrected by the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from blockrelay.scripts import Pace

#: Requests at once whose times between tokens are kept apart, as upper ends.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 1024)
#: A prompt row costs so many tokens' time before it was measured.
FIRST_ROW_SHARE = 0.2
SMOOTHING = 0.25
#: Seconds of work after which a window is closed.
WINDOW_S = 0.5


@dataclass(frozen=True, slots=True)
class Window:
    """`seconds` of work on `running` requests on average, and the prompt rows and tokens that came of it."""

    seconds: float
    running: float
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Smoothed seconds of a prompt row, and of a token by the number of requests at once (one of SIZES)."""

    row_s: float | None = None
    token_s: Mapping[int, float] = field(default_factory=dict[int, float])


def observed(known: Measured, window: Window) -> Measured:
    """`known` after a window."""
    if not window.rows and not window.tokens:
        return known
    size = next((s for s in SIZES if window.running <= s), SIZES[-1])
    token_s = known.token_s.get(size)
    if not window.tokens:
        return replace(known, row_s=_smooth(known.row_s, window.seconds / window.rows))
    row_s = known.row_s
    if not window.rows:
        return replace(known, token_s={**known.token_s, size: _smooth(token_s, window.seconds / window.tokens)})
    if row_s is None and token_s is None:
        both = window.seconds / (window.tokens + FIRST_ROW_SHARE * window.rows)
        return Measured(FIRST_ROW_SHARE * both, {**known.token_s, size: both})
    if row_s is None:
        row_s = FIRST_ROW_SHARE * (token_s or 0.0)
    if token_s is None:
        token_s = max(window.seconds - row_s * window.rows, 0.1 * window.seconds) / window.tokens
    # Both are wrong by the same factor, as far as one window tells.
    factor = window.seconds / (row_s * window.rows + token_s * window.tokens)
    return Measured(_smooth(row_s, row_s * factor), {**known.token_s, size: _smooth(token_s, token_s * factor)})


def pace(known: Measured) -> Pace | None:
    """What to tell: the time between tokens for the most requests at once that were seen. None before any token."""
    if not known.token_s:
        return None
    size = max(known.token_s)
    token_s = known.token_s[size]
    return Pace(FIRST_ROW_SHARE * token_s if known.row_s is None else known.row_s, token_s * size, size)


class PaceMeter:
    """Collects windows. The engine thread calls `look` and `add`; `pace` may be read by any thread."""

    def __init__(self) -> None:
        self.pace: Pace | None = None
        self._measured = Measured()
        self._at: float | None = None
        self._seconds = self._weighted = 0.0
        self._rows = self._tokens = 0

    def look(self, now: float, running: int) -> None:
        """Once a round: `running` requests are on this worker from `now` (monotonic seconds) to the next look."""
        if self._at is not None:
            self._seconds += now - self._at
            self._weighted += (now - self._at) * self._running
        self._at = now if running else None
        self._running = running
        if self._seconds >= WINDOW_S:
            window = Window(self._seconds, self._weighted / self._seconds, self._rows, self._tokens)
            self._measured = observed(self._measured, window)
            self.pace = pace(self._measured)
            self._seconds = self._weighted = 0.0
            self._rows = self._tokens = 0

    def add(self, *, rows: int, tokens: int) -> None:
        """A step has computed prompt rows, and rows that give tokens."""
        self._rows += rows
        self._tokens += tokens


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
