"""Finds the cost of each kind of work from the seconds of mixtures of them, by least squares. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def least(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Returns x >= 0 with the least sum of squared relative errors of `rows` x = `seconds`.

    Each row has the amounts of every kind of work in one measurement. Unknowns that would be negative are set to 0, the
    most negative first.
    """
    matrix: NDArray[np.float64] = np.array(rows, np.float64)
    target: NDArray[np.float64] = np.array(seconds, np.float64)
    scale = np.maximum(np.abs(target), 1e-9)[:, None]
    kept = list(range(matrix.shape[1]))
    while kept:
        solution, *_ = np.linalg.lstsq(matrix[:, kept] / scale, target / scale[:, 0], rcond=None)
        if solution.min() >= 0:
            return [float(solution[kept.index(i)]) if i in kept else 0.0 for i in range(matrix.shape[1])]
        kept.pop(int(np.argmin(solution * matrix[:, kept].mean(axis=0))))
    return [0.0] * matrix.shape[1]
