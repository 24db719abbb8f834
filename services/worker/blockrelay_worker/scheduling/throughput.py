"""The worker's pace under its present load, measured for admission control. Pure, but for PaceMeter.

All time counts while requests are on the worker (steps, commits, waits for other stages): clients wait for all of it.
The time of a window is split between prompt tokens and tokens in proportion to the known costs, and both costs are then
corrected by the same factor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from blockrelay.protocol.capabilities import Pace
from blockrelay_worker.scheduling.smoothing import smoothed

#: Upper ends of the concurrency buckets: token times are measured by the number of requests at once.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 1024)
#: Assumed cost of a prompt token before it was measured, as a share of a token's.
PROMPT_TOKEN_SHARE = 0.2
#: One window raises a cost to at most this many times the known one: a machine that paused for a minute is not slow.
MAX_GROWTH = 2
#: Seconds of work after which a window is closed.
WINDOW_S = 0.5
#: Seconds for which the highest recent concurrency is expected again.
RECENT_S = 30.0
#: Half-life in seconds, without work, of the part of a cost above its best value. A worker that counts as slow gets
#: nothing to do, and could never show otherwise.
REST_S = 30.0


@dataclass(frozen=True, slots=True)
class PaceWindow:
    """One window of work: its `seconds`, the average number of `running` requests, its prompt `rows` and `tokens`."""

    seconds: float
    running: float
    rows: int
    tokens: int

    @property
    def size(self) -> int:
        """The smallest bucket in SIZES that holds `running` requests; the last one if none does."""
        return next((s for s in SIZES if self.running <= s), SIZES[-1])


@dataclass(frozen=True, slots=True)
class MeasuredPace:
    """Measured costs in smoothed seconds: of a prompt token, and of a token by its bucket in SIZES.

    A token's cost is the time divided by the tokens of all requests together. With n requests, each waits n times as
    long for its next token.
    None, or a missing bucket: not measured yet.
    """

    row_s: float | None = None
    token_s: Mapping[int, float] = field(default_factory=dict[int, float])


def _smoothed(before: float | None, now: float) -> float:
    return smoothed(before, now, max_growth=MAX_GROWTH)


def observed(known: MeasuredPace, window: PaceWindow) -> MeasuredPace:
    """Returns the costs `known`, updated by a window; unchanged if it had neither prompt tokens nor tokens."""
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
        both = window.seconds / (window.tokens + PROMPT_TOKEN_SHARE * window.rows)
        return MeasuredPace(PROMPT_TOKEN_SHARE * both, {**known.token_s, size: both})
    if row_s is None:
        row_s = PROMPT_TOKEN_SHARE * (token_s or 0.0)
    if token_s is None:
        token_s = max(window.seconds - row_s * window.rows, 0.1 * window.seconds) / window.tokens
    # One window cannot tell which of the two costs is wrong: both are corrected by the same factor.
    factor = window.seconds / (row_s * window.rows + token_s * window.tokens)
    return MeasuredPace(_smoothed(row_s, row_s * factor), {**known.token_s, size: _smoothed(token_s, token_s * factor)})


def best_of(best: MeasuredPace, known: MeasuredPace) -> MeasuredPace:
    """Returns the lower of `best` and `known`, separately for each cost, for the buckets of `known`."""
    rows = [r for r in (best.row_s, known.row_s) if r is not None]
    token_s = {size: min(s, best.token_s.get(size, s)) for size, s in known.token_s.items()}
    return MeasuredPace(min(rows, default=None), token_s)


def rested(known: MeasuredPace, best: MeasuredPace, idle_s: float) -> MeasuredPace:
    """Returns `known` after `idle_s` seconds without work: decayed towards `best`, which has all its buckets."""
    left = 0.5 ** (idle_s / REST_S)
    token_s = {size: best.token_s[size] + (s - best.token_s[size]) * left for size, s in known.token_s.items()}
    row_s = None if known.row_s is None or best.row_s is None else best.row_s + (known.row_s - best.row_s) * left
    return MeasuredPace(row_s, token_s)


def pace(known: MeasuredPace, *, recent_concurrency: int = 1) -> Pace | None:
    """The pace to publish; None before any token. `recent_concurrency`: the highest one lately, of SIZES."""
    if not known.token_s:
        return None
    row_s = PROMPT_TOKEN_SHARE * known.token_s[max(known.token_s)] if known.row_s is None else known.row_s
    return Pace(row_s, {size: token_s * size for size, token_s in known.token_s.items()}, recent_concurrency)


class PaceMeter:
    """Measures the pace in windows. The engine thread calls `look` and `add`; any thread may call `pace_at`."""

    def __init__(self) -> None:
        self._measured = self._best = MeasuredPace()
        self._seen: dict[int, float] = {}  # end of the last window in each bucket of SIZES
        self._at: float | None = None  # time of the last look with requests here
        self._worked = float("-inf")  # time until which there was work
        self._seconds = self._weighted = 0.0
        self._running = self._rows = self._tokens = 0

    def pace_at(self, now: float) -> Pace | None:
        """Returns the pace at `now` (monotonic seconds); None before any token."""
        idle_s = now - self._worked if self._at is None else 0.0
        recent_concurrency = max((size for size, at in self._seen.copy().items() if now - at < RECENT_S), default=1)
        return pace(rested(self._measured, self._best, idle_s), recent_concurrency=recent_concurrency)

    def look(self, now: float, running: int) -> None:
        """Notes that `running` requests are here from `now` (monotonic seconds) on. Called once in each loop round."""
        if self._at is not None:
            self._seconds += now - self._at
            self._weighted += (now - self._at) * self._running
            self._worked = now
        elif running:
            self._measured = rested(self._measured, self._best, now - self._worked)
        self._at = now if running else None
        self._running = running
        if self._seconds >= WINDOW_S:
            window = PaceWindow(self._seconds, self._weighted / self._seconds, self._rows, self._tokens)
            known = observed(self._measured, window)
            self._best = best_of(self._best, known)  # set first: `pace_at`, in another thread, needs it for every size
            self._measured = known
            self._seen[window.size] = now
            self._seconds = self._weighted = 0.0
            self._rows = self._tokens = 0

    def add(self, *, rows: int, tokens: int) -> None:
        """Counts the prompt `rows` and the `tokens` of a step."""
        self._rows += rows
        self._tokens += tokens
