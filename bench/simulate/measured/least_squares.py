"""Costs of single things, from seconds of many of them together. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def least(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """x >= 0 with rows x ~ seconds, each line by its share: least squares, what would be negative left out."""
    matrix: NDArray[np.float64] = np.array(rows, np.float64)
    wanted: NDArray[np.float64] = np.array(seconds, np.float64)
    scale = np.maximum(np.abs(wanted), 1e-9)[:, None]
    kept = list(range(matrix.shape[1]))
    while kept:
        found, *_ = np.linalg.lstsq(matrix[:, kept] / scale, wanted / scale[:, 0], rcond=None)
        if found.min() >= 0:
            return [float(found[kept.index(i)]) if i in kept else 0.0 for i in range(matrix.shape[1])]
        kept.pop(int(np.argmin(found * matrix[:, kept].mean(axis=0))))
    return [0.0] * matrix.shape[1]
