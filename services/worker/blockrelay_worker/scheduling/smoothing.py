"""Exponential moving averages of measurements."""

#: Weight of a new measurement.
SMOOTHING = 0.25


def smoothed(before: float | None, now: float, *, max_growth: float | None = None) -> float:
    """The average `before`, updated by the measurement `now`; without an average before, `now` itself.

    `max_growth`: the measurement is clamped to that many times the average.
    """
    if before is None:
        return now
    if max_growth is not None:
        now = min(now, max_growth * before)
    return before + SMOOTHING * (now - before)
