"""Weights as MatMulNBits has them: numbers of 4 or 8 bits, in groups of inputs with a scale and a zero point each.

    weight[n, k] = (q[n, k] - zero[n, k // group]) * scale[n, k // group]

q is packed along the inputs, of two 4-bit numbers the first in the low half of a byte; so are zero points, which are 8
or 128 where none are given.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import GROUP
from blockrelay_converter.weight_source import Groups

_STORED_ZERO = 8


def unpacked(
    q: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.float32], *, bits: int, inputs: int
) -> NDArray[np.float32]:
    """float32 [N, inputs] of packed rows [N, groups, bytes], with scales and zero points [N, groups]."""
    count, groups, _ = q.shape
    numbers = q if bits == 8 else np.stack([q & 15, q >> 4], axis=-1)
    wide = numbers.reshape(count, groups, -1).astype(np.float32)
    wide -= zeros[:, :, None]
    wide *= scales[:, :, None]
    return wide.reshape(count, -1)[:, :inputs]


def zero_points(stored: NDArray[Any] | None, *, bits: int, rows: int, groups: int) -> NDArray[np.float32]:
    """[rows, groups] of what MatMulNBits is given."""
    if stored is None:
        return np.full((rows, groups), 1 << (bits - 1), np.float32)
    if stored.dtype != np.uint8:
        return stored.reshape(rows, groups).astype(np.float32)
    packed = stored.reshape(rows, -1)
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1)[:, :groups]
    return packed.astype(np.float32)


def as_groups(q: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.float32]) -> Groups | None:
    """Packed 4-bit rows [N, groups, 16] as w4a8 has them, if nothing has to be rounded for that.

    The number of a column, `scale`, is the power of two above its scales, so that the float16 `gs` are at most 1: this
    is exact for scales that were float16, unless they differ by more than float16 can hold.
    """
    if q.shape[2] * 2 != GROUP or (zeros != _STORED_ZERO).any() or not np.isfinite(scales).all():
        return None
    largest = np.abs(scales).max(axis=1)
    scale = np.where(largest > 0, np.ldexp(np.float32(1), np.frexp(largest)[1]), np.float32(1)).astype(np.float32)
    gs = (scales / scale[:, None]).astype(np.float16)
    if (gs.astype(np.float32) * scale[:, None] != scales).any():
        return None
    return q.reshape(len(q), -1).T, gs.T, scale
