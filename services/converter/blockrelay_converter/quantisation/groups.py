"""Rounds the weights of a linear layer to 4 bits, in groups of 32 inputs (w4a8).

A group's weights become nibble * gs + gm: nibble in 0..15, a scale gs and a minimum gm in float16. These are the
numbers of Q4_1, and with gm = -8 * gs those of Q4_0: weights that lie on such a grid keep their values.

Without calibration all arithmetic is element by element in one order, so that every machine gives the same bytes.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import GROUP
from blockrelay.host.cpu import cores
from blockrelay_converter.quantisation.gptq import round_in_order
from blockrelay_converter.quantisation.grids import grid_factors, mostly_on_grid
from blockrelay_converter.weight_source import F32, F64

F16 = NDArray[np.float16]
#: Ranges to try, as shares of the one from the smallest to the largest weight: clipping the ends may help the others.
_TRIED = (1.06, 1.0, 0.94, 0.88)
_MOST = np.float32(15)
"""The largest nibble."""
_HALF = np.float32(7.5)
_LARGEST = np.float32(np.finfo(np.float16).max)
#: Groups that a thread processes together: they and two arrays of their size fit into a core's second-level cache.
_TOGETHER = 4096


def quantise_groups(weights: F32, feedback: Sequence[F64] = ()) -> tuple[NDArray[np.uint8], F16, F16]:
    """Rounds the rows [N, K] of a linear layer to (q4 [K/2, N], gs [K/32, N], gm [K/32, N]); K a multiple of 32.

    These are the tensors of `model.block_tensors`: row i of q4 holds the nibbles of the inputs 2i (low half) and
    2i + 1. gs may be negative. The weights must be finite and within float16. Each range that is tried is moved to the
    least squares of the nibbles it rounds to, and no group has a larger squared error than with gs and gm from its
    ends. Where gs is 0, the nibbles are 0; a group of zeros has gm 0.

    With the layer's `feedback` (`gptq.feedback_of`) each weight first makes up for the errors before it, and the
    squared errors may be larger. Weights that lie on a grid of 4 bits are rounded without it: the little that bfloat16
    moved them would move others off the grid.
    """
    if feedback and not mostly_on_grid(weights):
        return _quantise_in_order(weights, feedback)
    count, depth = weights.shape
    groups = depth // GROUP
    rows = weights.reshape(count * groups, GROUP)
    q4 = np.empty((GROUP // 2, len(rows)), np.uint8)
    gs, gm = np.empty(len(rows), np.float16), np.empty(len(rows), np.float16)

    def quantise(start: int) -> None:
        part = slice(start, start + _TOGETHER)
        # A group lies along the first axis, so that NumPy works on all groups at once.
        values = np.ascontiguousarray(rows[part].T)
        q = np.empty_like(values)
        gs[part], gm[part] = _factors(values, q, np.empty_like(values))
        _nearest(values, gs[part].astype(np.float32), gm[part].astype(np.float32), out=q)
        q4[:, part] = q[0::2] + np.float32(16) * q[1::2]

    with ThreadPoolExecutor(cores(), thread_name_prefix="groups") as pool:
        for _ in pool.map(quantise, range(0, len(rows), _TOGETHER)):
            pass  # an error of a thread is raised here
    return (
        q4.reshape(GROUP // 2, count, groups).transpose(2, 0, 1).reshape(depth // 2, count),
        gs.reshape(count, groups).T,
        gm.reshape(count, groups).T,
    )


def _quantise_in_order(weights: F32, feedback: Sequence[F64]) -> tuple[NDArray[np.uint8], F16, F16]:
    room = np.empty((2, GROUP, len(weights)), np.float32)
    factors: list[tuple[F16, F16]] = []

    def grid(values: F64) -> tuple[F32, F32]:
        gs, gm = _factors(values.astype(np.float32), *room)
        factors.append((gs, gm))
        return gs.astype(np.float32), gm.astype(np.float32)

    q = round_in_order(weights, feedback, grid, lowest=0, highest=int(_MOST))
    gs, gm = (np.stack(each) for each in zip(*factors, strict=True))
    return (q[0::2] + np.float32(16) * q[1::2]).astype(np.uint8), gs, gm


def group_values(q4: NDArray[np.uint8], gs: F16, gm: F16) -> F32:
    """Returns the weights, float32 [N, K], that the result of `quantise_groups` stands for."""
    q = np.stack([q4 & 15, q4 >> 4], axis=1).reshape(-1, q4.shape[1]).astype(np.float32)
    return (q * np.repeat(gs.astype(np.float32), GROUP, axis=0) + np.repeat(gm.astype(np.float32), GROUP, axis=0)).T


def _factors(values: F32, q: F32, product: F32) -> tuple[F16, F16]:
    """Returns gs and gm [M] of some groups, the columns of `values` [32, M]. Overwrites `q` and `product`, of the same
    shape."""
    low, high = values.min(axis=0), values.max(axis=0)
    gs, gm = _narrow((high - low) / _MOST), _narrow(low)
    error = _error(values, gs, gm, q, product)

    def take(where: NDArray[np.intp] | slice, scale: NDArray[Any], minimum: NDArray[Any]) -> None:
        """Keeps these factors of the groups `where` that have a smaller error, rounded as they will be used."""
        part = values[:, where]
        count = part.shape[1]
        tried_gs, tried_gm = _narrow(scale), _narrow(minimum)
        errors = _error(part, tried_gs, tried_gm, q[:, :count], product[:, :count])
        better = errors < error[where]
        error[where] = np.where(better, errors, error[where])
        gs[where] = np.where(better, tried_gs, gs[where])
        gm[where] = np.where(better, tried_gm, gm[where])

    take(slice(None), *_least_squares(values, low, high, q, product))
    if (grids := grid_factors(values, low, high)) is not None:
        take(*grids)
    return gs, gm


def _least_squares(values: F32, low: F32, high: F32, q: F32, product: F32) -> tuple[F32, F32]:
    """Returns the scale and the minimum [M] of the range in _TRIED with the smallest squared error.

    With the nibbles fixed, the best scale is cov / var, and the squared error falls by cov**2 / var.
    """
    middle: F32 = (low + high) * np.float32(0.5)
    whole: F32 = (high - low) / _MOST
    best_scale, best_minimum, best_gain = np.zeros_like(low), low.copy(), np.full_like(low, -1)
    # Around the middle, so that a minimum far from 0 does not drown the differences.
    total = np.zeros_like(low)
    for line in values:
        total += line - middle
    for share in _TRIED:
        scale: F32 = whole * np.float32(share)
        below: F32 = scale * _HALF
        minimum: F32 = middle - below
        _nearest(values, scale, minimum, out=q)
        sums = _sum_of_lines(q)
        np.subtract(values, middle, out=product)
        product *= q
        mixed = _sum_of_lines(product)
        squares = _sum_of_lines(np.multiply(q, q, out=q))
        cov, var = GROUP * mixed - total * sums, GROUP * squares - sums * sums
        scale = np.divide(cov, var, out=np.zeros_like(cov), where=var > 0)
        gain = cov * scale
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best_scale, scale, where=better)
        np.copyto(best_minimum, middle + (total - scale * sums) / GROUP, where=better)
    return best_scale, best_minimum


def _narrow(numbers: NDArray[np.floating[Any]]) -> F16:
    """Returns the nearest float16; beyond its range, the largest one. Never -0."""
    return numbers.clip(-_LARGEST, _LARGEST).astype(np.float16) + np.float16(0)


def _error(values: F32, gs: F16, gm: F16, q: F32, product: F32) -> F32:
    """Returns the squared error of each group [M] with these factors. Overwrites `q` and `product`."""
    scale, minimum = gs.astype(np.float32), gm.astype(np.float32)
    _nearest(values, scale, minimum, out=q)
    np.multiply(q, scale, out=q)
    q += minimum
    q -= values
    return _sum_of_lines(np.multiply(q, q, out=q))


def _sum_of_lines(lines: F32) -> F32:
    """Returns the sum over the first axis, added in order (NumPy's own order may differ between machines)."""
    total = np.zeros(lines.shape[1], np.float32)
    for line in lines:
        total += line
    return total


def _nearest(values: F32, scale: F32, minimum: F32, *, out: F32) -> None:
    """Writes the nearest nibbles, 0..15, to `out`; 0 where the scale is 0."""
    np.subtract(values, minimum, out=out)
    out *= np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=np.abs(scale) > 2.0**-40)
    np.rint(out, out=out)
    np.clip(out, np.float32(0), _MOST, out=out)
