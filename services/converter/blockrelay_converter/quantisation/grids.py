"""Finds groups of weights that lie on a grid of 4 bits already, such as Q4_0's or Q4_1's, widened to floats."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import GROUP
from blockrelay_converter.weight_source import F32, F64

Indexes = NDArray[np.intp]
#: Most steps of a grid between the smallest and the largest weight of a group.
_MOST = 15
#: A weight lies on a grid if it is no further from it than this share of a step: bfloat16 moves some by a twentieth.
_TOLERANCE = 1 / 16
#: Weights of a group that are looked at first. In a group without a grid they are hardly ever all on one by chance.
_FEW = 8
#: Groups whose weights differ by less have no grid: float16 could not hold its step.
_SMALLEST = np.float32(2.0**-24)


def grid_factors(values: F32, low: F32, high: F32) -> tuple[Indexes, F64, F64] | None:
    """Returns (indexes, scales, minimums) of the groups that lie on a grid, or None if none does.

    A group is a column of `values` [32, M], with its smallest and its largest weight in `low` and `high`. A scale is
    the step of the grid as float16 holds it, or its negative. The minimum is the point that float16 holds best among
    those of the grid that can have the nibble 0.
    """
    # A grid of fewer steps is also one of twice as many.
    some = np.flatnonzero(_steps(values[:_FEW], low, high, range(_MOST // 2 + 1, _MOST + 1)))
    if not some.size:
        return None
    values, low, high = values[:, some], low[some], high[some]
    # The fewest steps last, for float16 need not hold a third of a step that it holds.
    steps = _steps(values, low, high, range(_MOST, 0, -1))
    found = np.flatnonzero(steps)
    if not found.size:
        return None
    wide, low, high, steps = values[:, found].astype(np.float64), low[found], high[found], steps[found]
    points = np.rint((wide - low) * (steps / (high.astype(np.float64) - low)))
    # In float64 such sums round nothing, and the least squares of an exact grid give its step.
    total, sums, mixed, squares = (np.zeros(found.size) for _ in range(4))
    for value, point in zip(wide, points, strict=True):
        total += value
        sums += point
        mixed += value * point
        squares += point * point
    scale = (GROUP * mixed - total * sums) / (GROUP * squares - sums * sums)
    scale = scale.astype(np.float16).astype(np.float64)
    return some[found], *_best_minimum(scale, (total - scale * sums) / GROUP, steps)


def mostly_on_grid(weights: F32) -> bool:
    """True if at least half of the groups of the rows [N, K] lie on a grid; K is a multiple of 32."""
    groups = np.ascontiguousarray(weights.reshape(-1, GROUP).T)
    found = grid_factors(groups, groups.min(axis=0), groups.max(axis=0))
    return found is not None and 2 * len(found[0]) >= groups.shape[1]


def _steps(values: F32, low: F32, high: F32, tried: Iterable[int]) -> Indexes:
    """Returns the last number in `tried` that is the steps of a grid on which a column of `values` lies; 0: none is."""
    found = np.zeros(len(low), np.intp)
    varied = high - low > _SMALLEST
    places = (values - low) * np.divide(np.float32(1), high - low, out=np.zeros_like(low), where=varied)
    for steps in tried:
        place = places * np.float32(steps)
        place -= np.rint(place)
        found[varied & (np.abs(place).max(axis=0) <= _TOLERANCE)] = steps
    return found


def _best_minimum(scale: F64, lowest: F64, steps: Indexes) -> tuple[F64, F64]:
    """Returns (scale, minimum) of grids whose points from `lowest` to `steps` steps above it must all have nibbles.

    A negative scale counts from the highest point down.
    """
    best_scale, best_minimum, least = scale, lowest, np.full(len(scale), np.inf)
    for unused in range(_MOST):  # points that come before the first weight
        for sign, first in ((1, lowest), (-1, lowest + steps * scale)):
            minimum = first - sign * unused * scale
            with np.errstate(over="ignore"):  # beyond float16: infinitely far
                error = np.abs(minimum.astype(np.float16).astype(np.float64) - minimum)
            better = (error < least) & (unused + steps <= _MOST)
            least = np.where(better, error, least)
            best_scale = np.where(better, sign * scale, best_scale)
            best_minimum = np.where(better, minimum, best_minimum)
    return best_scale, best_minimum
