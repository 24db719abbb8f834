"""Unpacks the weights of ONNX's MatMulNBits: 4 or 8 bits, in groups of inputs with a scale and a zero point each.

    weight[n, k] = (q[n, k] - zero[n, k // group]) * scale[n, k // group]

q is packed along the inputs; the first of two 4-bit numbers is in the low half of a byte. Zero points are packed alike,
and are 8 or 128 by default.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import GROUP
from blockrelay_converter.weight_source import Groups


def unpacked(
    q: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.float32], *, bits: int, inputs: int
) -> NDArray[np.float32]:
    """Returns float32 [N, inputs] for packed rows `q` [N, groups, bytes] and their scales and zeros [N, groups]."""
    count, groups, _ = q.shape
    numbers = q if bits == 8 else np.stack([q & 15, q >> 4], axis=-1)
    wide = numbers.reshape(count, groups, -1).astype(np.float32)
    wide -= zeros[:, :, None]
    wide *= scales[:, :, None]
    return wide.reshape(count, -1)[:, :inputs]


def zero_points(stored: NDArray[Any] | None, *, bits: int, rows: int, groups: int) -> NDArray[np.float32]:
    """Returns zero points, float32 [rows, groups], from the optional input of MatMulNBits (packed bytes or floats)."""
    if stored is None:
        return np.full((rows, groups), 1 << (bits - 1), np.float32)
    if stored.dtype != np.uint8:
        return stored.reshape(rows, groups).astype(np.float32)
    packed = stored.reshape(rows, -1)
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1)[:, :groups]
    return packed.astype(np.float32)


def as_groups(q: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.float32]) -> Groups | None:
    """Converts packed 4-bit rows [N, groups, 16] to w4a8: (q4 [K/2, N], gs [K/32, N], gm [K/32, N]), or returns None.

    `scales` and `zeros` are [N, groups]; the inputs K must be a multiple of 32, because padding would become weights.
    None: the groups do not have 32 inputs, or float16 does not hold each scale and each minimum -zero * scale.
    """
    if q.shape[2] * 2 != GROUP:
        return None
    minimums = -zeros.astype(np.float64) * scales + 0.0  # no -0
    with np.errstate(over="ignore"):  # infinity is not equal
        gs, gm = scales.astype(np.float16), minimums.astype(np.float16)
    if not (np.isfinite(scales).all() and (gs == scales).all() and (gm == minimums).all()):
        return None
    return q.reshape(len(q), -1).T, gs.T, gm.T
