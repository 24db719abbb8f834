"""The products of w8a8 and w4a8 by their definition, in NumPy: the oracle behind every known answer.

They share no code and no instruction with what serves: whole numbers in float32 and float64, multiplied by BLAS. That
is exact, in whatever order BLAS adds and whether it fuses or not: |u - 128| and |q| are at most 128 for any uint8 and
int8, so the sum over 1024 of their products, and every part of it, is at most 2**24, and float32 holds all whole
numbers up to there. Sums of such parts stay below 2**53 in float64. A group of w4a8 is far shallower.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.manifest import GROUP
from blockrelay_worker.kernels.float32 import fma

#: Largest depth whose sums are exact in float32.
EXACT_DEPTH = 1 << 10
#: Columns turned into float32 at a time: 16 MiB of weights.
_COLUMNS = 1 << 12


class ExactLinear:
    """y = float32(sum over k of (u - 128) * q) * scale, bit for bit."""

    def __init__(self, q: NDArray[np.int8], scale: NDArray[np.float32]) -> None:
        """q [K, N] and scale [N]; neither is copied."""
        self._q = q
        self._scale = scale

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        """Multiply `rows` (uint8 with zero point 128, [R, K]) into `out` [R, N]."""
        depth, width = self._q.shape
        centred = rows.astype(np.float32) - np.float32(128)
        buffer = np.empty(min(depth, EXACT_DEPTH) * min(width, _COLUMNS), np.float32)
        for left in range(0, width, _COLUMNS):
            columns = slice(left, min(left + _COLUMNS, width))
            total = np.zeros((rows.shape[0], columns.stop - left), np.float64)
            for top in range(0, depth, EXACT_DEPTH):
                part = self._q[top : top + EXACT_DEPTH, columns]
                weights = buffer[: part.size].reshape(part.shape)
                np.copyto(weights, part)
                total += centred[:, top : top + EXACT_DEPTH] @ weights
            np.multiply(total.astype(np.float32), self._scale[columns], out=out[:, columns])

    def forget_buffers(self) -> None:
        """Nothing to forget."""


class ExactGroupLinear:
    """y = acc * scale; acc = fma(float32(sum over k in g of (u - 128) * q), gs[g], acc) for groups g from 0 upwards."""

    def __init__(self, q4: NDArray[np.uint8], gs: NDArray[np.float16], scale: NDArray[np.float32]) -> None:
        """q4 [K/2, N], gs [K/32, N] and scale [N] as in `manifest.block_tensors`; none is copied."""
        self._q4 = q4
        self._gs = gs
        self._scale = scale

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        """Multiply `rows` (uint8 with zero point 128, [R, K]) into `out` [R, N]."""
        groups, width = self._gs.shape
        centred = rows.astype(np.float32) - np.float32(128)
        for left in range(0, width, _COLUMNS):
            columns = slice(left, min(left + _COLUMNS, width))
            acc = np.zeros((rows.shape[0], columns.stop - left), np.float32)
            weights = np.empty((GROUP, columns.stop - left), np.float32)
            for group in range(groups):
                nibbles = self._q4[group * GROUP // 2 : (group + 1) * GROUP // 2, columns]
                weights[0::2], weights[1::2] = nibbles & 15, nibbles >> 4
                weights -= np.float32(8)
                dot = centred[:, group * GROUP : (group + 1) * GROUP] @ weights
                acc = fma(dot, self._gs[group, columns].astype(np.float32), acc)
            np.multiply(acc, self._scale[columns], out=out[:, columns])

    def forget_buffers(self) -> None:
        """Nothing to forget."""
