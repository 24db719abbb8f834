"""Multiplies arrays by Hadamard matrices, in butterflies: sums and differences in a fixed order, without BLAS.

All arithmetic is element by element, so that every machine gives the same bytes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay_converter.weight_source import F32


def transform(values: NDArray[np.floating[Any]], size: int) -> None:
    """Multiplies each block of `size` rows of `values` [K, N] by a Hadamard matrix of ones and minus ones, in place.

    `size` is a power of two that divides K. `values` is contiguous. Two calls multiply by `size`: the matrix is
    symmetric, and its rows are orthogonal, each with the length sqrt(size).
    """
    assert values.flags.c_contiguous
    step = 1
    while step < size:
        pairs = values.reshape(-1, 2, step, values.shape[1])
        first, second = pairs[:, 0], pairs[:, 1]
        total = first + second
        np.subtract(first, second, out=second)
        first[...] = total
        step *= 2


def spread_inputs(weights: F32, size: int) -> F32:
    """Returns the rows [N, K] of a linear layer whose inputs will be multiplied by Hadamard matrices of `size`.

    The layer's output stays the same: weights are multiplied by the inverse, which divides by `size` and rounds nothing
    but the sums.
    """
    columns = np.ascontiguousarray(weights.T)
    transform(columns, size)
    columns *= np.float32(1 / size)
    return columns.T
