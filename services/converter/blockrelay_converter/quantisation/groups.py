"""Rounds the weights of a linear layer to 4 bits, in groups of 32 inputs (w4a8).

A column's weights become q * gs * scale: q in -8..7, one gs per group, one scale per column. The 4-bit range is
lopsided, so gs carries a sign: the larger end of a group always lies at -8, which lowers the error by a twentieth.

All arithmetic is element by element in float32, in one order, so that every machine gives the same bytes.
"""

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import GROUP

F32 = NDArray[np.float32]
#: Group factors to try, as shares of the one that clips nothing: clipping the largest weight may help the others.
_TRIED = (1.0, 0.93, 0.86, 0.79)
#: A column whose largest magnitude is smaller counts as zero: its scale would lose bits.
_SMALLEST = np.float32(2.0**-100)
#: Group factors below this become 0: for columns in [0.5, 1) they are far under half the smallest float16.
_VANISHING = np.float32(2.0**-40)
#: Groups processed together: they and two arrays of their size fit into a core's second-level cache (a megabyte).
_TOGETHER = 4096


def quantise_groups(weights: F32) -> tuple[NDArray[np.uint8], NDArray[np.float16], F32]:
    """Rounds the finite rows [N, K] of a linear layer to (q4 [K/2, N], gs [K/32, N], scale [N]); K a multiple of 32.

    These are the tensors of `model.block_tensors`: row i of q4 holds q + 8 of the inputs 2i (low half) and 2i + 1;
    |gs| <= 1; scale > 0. Each group factor that is tried is moved to the least squares of the numbers it rounds to, and
    the one with the smallest squared error wins. A zero column has scale 1, gs 0 and q 0.
    """
    count, depth = weights.shape
    groups = depth // GROUP
    largest = np.abs(weights).max(axis=1)
    # Scaled to [0.5, 1) by a power of two, which rounds nothing, so that no square underflows.
    exponent = np.where(largest < _SMALLEST, 0, np.frexp(largest)[1]).astype(np.int32)
    to_unit = np.where(largest < _SMALLEST, np.float32(0), np.ldexp(np.float32(1), -exponent))
    # [32, N * groups]: a group lies along the first axis, so that NumPy works on all groups at once.
    values = np.ascontiguousarray((weights * to_unit[:, None]).reshape(count * groups, GROUP).T)
    sign = np.where(values.max(axis=0) > -values.min(axis=0), np.float32(-1), np.float32(1))
    values *= sign
    factor = _best_factors(values).reshape(count, groups)
    scale = factor.max(axis=1)
    scale[scale == 0] = 1
    gs = (factor / scale[:, None]).astype(np.float16)
    rounded = gs.astype(np.float32) * scale[:, None]
    _nearest(values, _inverse(rounded.reshape(-1)), out=values)
    values += np.float32(8)
    q = values.astype(np.uint8)
    q4 = q[0::2] | (q[1::2] << np.uint8(4))
    return (
        q4.reshape(GROUP // 2, count, groups).transpose(2, 0, 1).reshape(depth // 2, count),
        (gs * sign.reshape(count, groups).astype(np.float16)).T,
        np.ldexp(scale, exponent),
    )


def group_values(q4: NDArray[np.uint8], gs: NDArray[np.float16], scale: F32) -> F32:
    """Returns the weights, float32 [N, K], that the result of `quantise_groups` stands for."""
    q = np.stack([q4 & 15, q4 >> 4], axis=1).reshape(-1, q4.shape[1]).astype(np.float32) - np.float32(8)
    return (q * np.repeat(gs.astype(np.float32), GROUP, axis=0) * scale).T


def _best_factors(values: F32) -> F32:
    """Returns the factor of each group, [M]; 0 for a group of zeros.

    A group is a column of `values` [32, M], and its largest magnitude is negative.
    """
    factors = np.empty(values.shape[1], np.float32)
    room = np.empty((2, GROUP, _TOGETHER), np.float32)
    for start in range(0, factors.size, _TOGETHER):
        part = values[:, start : start + _TOGETHER]
        q, product = room[:, :, : part.shape[1]]
        factors[start : start + _TOGETHER] = _best_factor(part, q, product)
    return factors


def _best_factor(values: F32, q: F32, product: F32) -> F32:
    """Returns the factors of some groups. Overwrites `q` and `product`, which have the shape of `values`.

    With q fixed, the best factor is sum(w q) / sum(q q), and the squared error falls by sum(w q)**2 / sum(q q).
    """
    whole = np.maximum(values.max(axis=0) / np.float32(7), values.min(axis=0) / np.float32(-8))
    best = np.zeros_like(whole)
    gain = np.zeros_like(whole)
    for part in _TRIED:
        _nearest(values, _inverse(whole * np.float32(part)), out=q)
        mixed = _sum_of_lines(np.multiply(values, q, out=product))
        squares = _sum_of_lines(np.multiply(q, q, out=q))
        factor = np.divide(mixed, squares, out=np.zeros_like(mixed), where=squares > 0)
        gained = mixed * factor
        better = gained > gain
        np.copyto(gain, gained, where=better)
        np.copyto(best, factor, where=better)
    return best


def _sum_of_lines(lines: F32) -> F32:
    """Returns the sum over the first axis, added in order (NumPy's own order may differ between machines)."""
    total = np.zeros(lines.shape[1], np.float32)
    for line in lines:
        total += line
    return total


def _nearest(values: F32, inverse: F32, *, out: F32) -> None:
    """Writes values * inverse, rounded to the nearest integer in -8..7, to `out`."""
    np.multiply(values, inverse, out=out)
    np.rint(out, out=out)
    np.clip(out, np.float32(-8), np.float32(7), out=out)


def _inverse(factor: F32) -> F32:
    """Returns 1 / factor, and 0 where the factor is below _VANISHING."""
    return np.divide(np.float32(1), factor, out=np.zeros_like(factor), where=factor > _VANISHING)
