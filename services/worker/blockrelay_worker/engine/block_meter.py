"""Measures the blocks of a stage in decode steps, for the plan: how long does each take of late?"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from blockrelay.host.memory import available_bytes
from blockrelay.protocol.block_times import BlockTimes
from blockrelay_worker.scheduling.work import Work

#: Seconds of a window; the last full one and the present one count together.
WINDOW_S = 5.0
#: Steps in both below which nothing is known: a single step may have been paused.
LEAST_STEPS = 8


@dataclass(slots=True)
class _Window:
    """The sums of some steps."""

    since: float
    """Monotonic seconds."""
    steps: int = 0
    rows: int = 0
    context: int = 0
    """The tokens that all rows attended to."""
    seconds: list[float] = field(default_factory=list[float])
    """The sum of each block's seconds."""


class BlockMeter:
    """The block times of a stage that begins with block `first`. The engine adds steps; another thread reads."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._lock = threading.Lock()
        self._now, self._before = _Window(time.monotonic()), _Window(0.0)
        self._is_news = False

    def add(self, work: Sequence[Work], seconds: Mapping[str, float]) -> None:
        """Adds a step of `work`, which took `seconds` in each block. Steps with tokens of prompts are left out."""
        if not seconds or not all(item.decodes for item in work):
            return
        now = time.monotonic()
        with self._lock:
            if now - self._now.since >= WINDOW_S:
                late = now - self._now.since >= 2 * WINDOW_S  # there was no step for as long
                self._before, self._now = _Window(0.0) if late else self._now, _Window(now)
            window, self._is_news = self._now, True
            window.steps += 1
            for item in work:
                window.rows += item.rows
                window.context += item.rows * (item.position + item.rows)
            before = window.seconds or [0.0] * len(seconds)
            window.seconds = [sum(pair) for pair in zip(before, seconds.values(), strict=True)]

    def times(self) -> BlockTimes | None:
        """Returns the mean times of late; None after fewer than LEAST_STEPS steps, or without a new one."""
        with self._lock:
            if not self._is_news:
                return None
            windows = [window for window in (self._before, self._now) if window.steps]
            steps, rows = sum(window.steps for window in windows), sum(window.rows for window in windows)
            if steps < LEAST_STEPS:
                return None
            self._is_news = False
            sums = [sum(blocks) for blocks in zip(*(window.seconds for window in windows), strict=True)]
            return BlockTimes(
                first=self._first,
                seconds=tuple(one / steps for one in sums),
                rows=rows / steps,
                context=sum(window.context for window in windows) / rows,
                free_bytes=available_bytes(),
            )
