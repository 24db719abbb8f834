"""Linear layers of w8a8 and w4a8 by definition, in NumPy: the reference behind every known answer.

They share no code with the layers that serve: BLAS multiplies whole numbers in float32 and float64. That is exact in
whatever order BLAS adds, fused or not. |u - 128| and |q| are at most 128 for any uint8 and int8, so the sum over 1024
of their products, and every part of it, is at most 2**24, and float32 holds all whole numbers up to there. Sums of
such parts stay below 2**53 in float64. A group of w4a8 is far shallower.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import GROUP
from blockrelay_worker.kernels.float32 import fma
from blockrelay_worker.kernels.interface import Linear

#: Largest depth whose sums are exact in float32.
EXACT_DEPTH = 1 << 10
#: Columns of weights that are converted to float32 at a time: 16 MiB.
_COLUMNS = 1 << 12


class ExactLinear(Linear):
    """A w8a8 linear layer: y = float32(sum over k of (u - 128) * q) * scale, bit for bit."""

    def __init__(self, q: NDArray[np.int8], scale: NDArray[np.float32]) -> None:
        """q [K, N] and scale [N]; neither is copied."""
        self._q = q
        self._scale = scale

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        """Multiplies `rows` (uint8 with zero point 128, [R, K]) into `out` [R, N]."""
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


class ExactGroupLinear(Linear):
    """A w4a8 linear layer, bit for bit.

    y = acc * scale, where acc = fma(float32(sum over k in g of (u - 128) * q), gs[g], acc) for groups g from 0 upwards.
    A group has 32 inputs; u are the uint8 rows, q the weights from -8 to 7, and gs the scales of groups.
    """

    def __init__(self, q4: NDArray[np.uint8], gs: NDArray[np.float16], scale: NDArray[np.float32]) -> None:
        """q4 [K/2, N], gs [K/32, N] and scale [N] as in `model.block_tensors`; none is copied."""
        self._q4 = q4
        self._gs = gs
        self._scale = scale
        # Every float16 is a multiple of 2**-24, so is its product with a group's sum (at most 2**15), and so is acc.
        # With gs of at most 1, as the converter writes them, the summands stay far below 2**29: float64 holds the sum
        # exactly, and the one rounding is that of the fma. Emulating an fma in general takes three times as long.
        self._one_rounding = bool((np.abs(gs) <= 1).all()) and gs.shape[0] < 1 << 13

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        """Multiplies `rows` (uint8 with zero point 128, [R, K]) into `out` [R, N]."""
        groups, width = self._gs.shape
        centred = rows.astype(np.float32) - np.float32(128)
        # The two halves of a byte are neighbours in k; within a group, all lower halves go before all upper ones.
        halves = centred.reshape(-1, groups, GROUP // 2, 2).transpose(1, 0, 3, 2).reshape(groups, -1, GROUP)
        eights = np.float32(8) * halves.sum(axis=2, keepdims=True)  # whole numbers: exact in any order
        for left in range(0, width, _COLUMNS):
            columns = slice(left, min(left + _COLUMNS, width))
            acc = np.zeros((rows.shape[0], columns.stop - left), np.float32)
            weights = np.empty((GROUP, columns.stop - left), np.float32)
            for group in range(groups):
                nibbles = self._q4[group * GROUP // 2 : (group + 1) * GROUP // 2, columns]
                weights[: GROUP // 2], weights[GROUP // 2 :] = nibbles & 15, nibbles >> 4  # q + 8
                dot = halves[group] @ weights - eights[group]
                factor = self._gs[group, columns]
                if self._one_rounding:
                    acc = (dot.astype(np.float64) * factor + acc).astype(np.float32)
                else:
                    acc = fma(dot, factor.astype(np.float32), acc)
            np.multiply(acc, self._scale[columns], out=out[:, columns])
