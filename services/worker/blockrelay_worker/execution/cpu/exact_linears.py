"""Linear layers of w8a8 and w4a8 by definition, in NumPy: the reference behind every known answer.

They share no code with the layers that serve: BLAS multiplies whole numbers in float32 and float64. That is exact in
whatever order BLAS adds, fused or not. |u - 128| and |q| are at most 128 for any uint8 and int8, so the sum over 1024
of their products, and every part of it, is at most 2**24, and float32 holds all whole numbers up to there. Sums of
such parts stay below 2**53 in float64. A group of w4a8 is far shallower.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import GROUP
from blockrelay.host.cpu import cores
from blockrelay_worker.kernels.float32 import fma
from blockrelay_worker.kernels.interface import Linear

#: Largest depth whose sums are exact in float32.
EXACT_DEPTH = 1 << 10
#: Columns of weights that are converted to float32 at a time: 16 MiB.
_COLUMNS = 1 << 12
#: Columns of weights in groups that a thread multiplies at a time: their arrays stay in a CPU cache.
_GROUP_COLUMNS = 1 << 9


class ExactLinear(Linear):
    """A w8a8 linear layer: y = float32(sum over k of (u - 128) * q) * scale, bit for bit."""

    def __init__(self, q: NDArray[np.int8], scale: NDArray[np.float32]) -> None:
        """q [K, N] and scale [N]; neither is copied."""
        self._q = q
        self._scale = scale

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32], scale: NDArray[np.float32] | None = None) -> None:
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
    """A w4a8 linear layer, bit for bit: the group matmul of `kernels.specification`.

    The rows have one scale for each group of 32 inputs, and the weights are nibble * gs + gm.
    """

    def __init__(self, q4: NDArray[np.uint8], gs: NDArray[np.float16], gm: NDArray[np.float16]) -> None:
        """q4 [K/2, N], gs and gm [K/32, N] as in `model.block_tensors`; none is copied."""
        self._q4 = q4
        self._gs = gs
        self._gm = gm

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32], scale: NDArray[np.float32] | None = None) -> None:
        """Multiplies `rows` (uint8 with zero point 128, [R, K]), which have `scale` [R, K/32], into `out` [R, N]."""
        assert scale is not None, "rows in groups have scales"
        groups, width = self._gs.shape
        centred = rows.astype(np.float32) - np.float32(128)
        # The two halves of a byte are neighbours in k; within a group, all lower halves go before all upper ones.
        halves = centred.reshape(-1, groups, GROUP // 2, 2).transpose(1, 0, 3, 2).reshape(groups, -1, GROUP)

        def multiply(left: int) -> None:
            columns = slice(left, min(left + _GROUP_COLUMNS, width))
            with np.errstate(all="ignore"):  # a row that is not finite has scales that are none
                out[:, columns] = self._columns(halves, scale, columns)

        if width <= _GROUP_COLUMNS:
            multiply(0)
            return
        with ThreadPoolExecutor(cores(), thread_name_prefix="exact") as pool:
            for _ in pool.map(multiply, range(0, width, _GROUP_COLUMNS)):
                pass  # an error of a thread is raised here

    def _columns(self, halves: NDArray[np.float32], scale: NDArray[np.float32], columns: slice) -> NDArray[np.float32]:
        """Returns the product of some columns; `halves` are the rows minus 128, [K/32, R, 32]."""
        groups, count, _ = halves.shape
        acc = np.zeros((count, columns.stop - columns.start), np.float32)
        weights = np.empty((GROUP, columns.stop - columns.start), np.float32)
        totals = halves.sum(axis=2).T * scale  # [R, K/32]; sums of whole numbers are exact in any order
        for group in range(groups):
            nibbles = self._q4[group * GROUP // 2 : (group + 1) * GROUP // 2, columns]
            weights[: GROUP // 2], weights[GROUP // 2 :] = nibbles & 15, nibbles >> 4
            factor, minimum = (part[group, columns].astype(np.float32) for part in (self._gs, self._gm))
            acc = fma(totals[:, group, None], minimum, acc)
            acc = fma(halves[group] @ weights, factor * scale[:, group, None], acc)
        return acc
