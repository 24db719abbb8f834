"""Averages of what was measured, in which the past fades."""

#: Weight of a new measurement.
SMOOTHING = 0.25


def smoothed(before: float | None, now: float, *, max_growth: float | None = None) -> float:
    """The average after a measurement; the measurement itself where there was none before.

    With `max_growth` one measurement counts as at most so many times what was known.
    """
    if before is None:
        return now
    if max_growth is not None:
        now = min(now, max_growth * before)
    return before + SMOOTHING * (now - before)
