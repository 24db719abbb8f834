"""The float32 arithmetic of `specification` in NumPy: fused multiply-add, lane sums, exp, quantisation.

Uses only +, -, *, /, sqrt, comparisons and casts, which IEEE 754 defines to the last bit on every machine.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.kernels.arguments import F32, U8
from blockrelay_worker.kernels.specification import LANES, ZERO_POINT

F64: TypeAlias = NDArray[np.float64]

_ONE = np.float32(1)
_NAN = np.float32(np.nan)
_LOG2E = np.float32(1.44269504)
_LN2_HIGH = np.float32(-0.693359375)
_LN2_LOW = np.float32(2.12194440e-4)
_EXP_FIRST = np.float32(1.9875691500e-4)
_EXP_REST = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_LOW = np.float32(-87)
_EXP_HIGH = np.float32(88)
_SCALE_STEP = np.float32(1) / np.float32(127)
_SCALE_FLOOR = np.float32(1e-12)
#: Adding and then subtracting this number rounds |x| < 2**22 to an integer, half to even.
_ROUND = np.float32(12582912)

# Bit patterns of float64: the bits below a float32 mantissa, and their value half way between two float32.
_LOW_BITS = np.int64(0x1FFFFFFF)
_HALF_WAY = np.int64(0x10000000)
_SMALLEST_NORMAL = 2.0**-126


def fma(a: NDArray[Any], b: NDArray[Any] | np.float32, c: NDArray[Any] | np.float32) -> F32:
    """Returns a*b + c rounded once to float32.

    The arguments are float32 values, in float32 or float64 arrays (float64 saves a conversion).

    The float64 product of two float32 is exact. Rounding the float64 sum again to float32 is wrong only where that sum
    lies exactly half way between two float32 (or near the subnormals, where half way is elsewhere); there the sum is
    first rounded to odd, with the error from Knuth's TwoSum, which makes double rounding harmless.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total: F64 = np.asarray(np.add(product, c, dtype=np.float64))
    bits = total.view(np.int64)
    doubtful = ((bits & _LOW_BITS) == _HALF_WAY) | (np.abs(total) < _SMALLEST_NORMAL)
    if doubtful.any():
        _round_to_odd(total, product, np.broadcast_to(np.asarray(c, np.float64), total.shape), doubtful)
    return total.astype(np.float32)


def _round_to_odd(total: F64, product: F64, c: F64, where: NDArray[np.bool_]) -> None:
    """Replaces total[where] = product + c, rounded to nearest, by the same sum rounded to odd."""
    s, x, y = total[where], np.broadcast_to(product, total.shape)[where], c[where]
    from_y = s - x
    error = (x - (s - from_y)) + (y - from_y)
    bits = s.view(np.int64)
    inexact = (error != 0) & np.isfinite(s) & ((bits & 1) == 0)
    bits += np.where(inexact, np.where((error > 0) == (s > 0), 1, -1), 0)
    total[where] = s


def lane_sum_of_squares(x: F32) -> F32:
    """Returns lane_sum(fma(x, x, .)) over the last axis, as `specification` defines it: [..., n] -> [...]."""
    n = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-n // LANES) * LANES), np.float64)
    padded[..., :n] = x  # a zero leaves its accumulator as it is
    lanes = np.zeros((*x.shape[:-1], LANES), np.float32)
    for start in range(0, n, LANES):
        piece = padded[..., start : start + LANES]
        lanes = fma(piece, piece, lanes)
    quarters = lanes.reshape(*x.shape[:-1], 4, LANES // 4)
    pairs: F32 = np.add(quarters[..., 0::2, :], quarters[..., 1::2, :])
    sums: F32 = np.add(pairs[..., 0, :], pairs[..., 1, :])
    total = sums[..., 0]
    for lane in range(1, LANES // 4):
        total = total + sums[..., lane]
    return total


def norm(x: F32, weight: F32, eps: float) -> F32:
    """Returns the root mean square norm of x [..., n] over the last axis, times weight [n].

    A row whose mean square is not finite becomes NaN.
    """
    spread = lane_sum_of_squares(x) / np.float32(x.shape[-1]) + np.float32(eps)
    inverse = np.where(np.isfinite(spread), _ONE / np.sqrt(spread), _NAN)
    return (x * inverse[..., None]) * weight


def round_half_even(x: F32) -> F32:
    """Returns the nearest integer, half to even, as float32; for |x| < 2**22."""
    return (x + _ROUND) - _ROUND


def exp(x: F32) -> F32:
    """Returns exp(x) by the polynomial of `specification`; x is clamped to -87..88."""
    x = np.where(x < _EXP_LOW, _EXP_LOW, x)
    x = np.where(x > _EXP_HIGH, _EXP_HIGH, x)
    shifted = x * _LOG2E + _ROUND
    k = shifted - _ROUND
    y = fma(k, _LN2_LOW, fma(k, _LN2_HIGH, x))
    p = np.full_like(y, _EXP_FIRST)
    for coefficient in _EXP_REST:
        p = fma(p, y, np.float32(coefficient))
    p = fma(p, y * y, y) + _ONE
    exponent = (np.asarray(shifted).view(np.uint32) - _ROUND.view(np.uint32) + np.uint32(127)) << np.uint32(23)
    return p * exponent.view(np.float32)


def swiglu(gate: F32, up: F32) -> F32:
    """Returns (gate / (1 + exp(-gate))) * up."""
    silu: F32 = np.divide(gate, _ONE + exp(-gate))
    return silu * up


def hadamard(x: F32, size: int) -> F32:
    """Returns x [R,n] with each block of `size` values, a power of two that divides n, in butterflies.

    The result is x times a Hadamard matrix of that size, without a factor.
    """
    step = 1
    while step < size:
        pairs = x.reshape(-1, 2, step)
        first, second = pairs[:, 0], pairs[:, 1]
        x = np.stack([first + second, first - second], axis=1).reshape(x.shape)
        step *= 2
    return x


def quantise(x: F32, u: U8, scale: F32, group: int = 0) -> None:
    """Quantises x [R,n] per row: writes u [R,n], with zero point 128, and scale [R].

    scale = max|x| * float32(1/127) + 1e-12, and u = x / scale, rounded half to even, + 128. With `group`, which divides
    n, each `group` values of a row do so with a scale of their own, and scale is [R,n/group]. A row that is not finite
    gets the scale NaN, and 128 everywhere.
    """
    rows, columns = x.shape
    size = group or columns
    parts = x.reshape(rows, columns // size, size)
    largest = (parts.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=2).view(np.float32)
    finite = np.isfinite(largest).all(axis=1, keepdims=True)
    scales = np.where(finite, largest * _SCALE_STEP + _SCALE_FLOOR, _NAN)
    ratio = round_half_even(np.where(finite[..., None], parts / scales[..., None], np.float32(0)))
    u[:] = (ratio + np.float32(ZERO_POINT)).astype(np.uint8).reshape(rows, columns)
    scale[:] = scales.reshape(scale.shape)
