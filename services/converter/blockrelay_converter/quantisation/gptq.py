"""Rounds linear layers so that each weight makes up for the rounding of those before it (GPTQ, arXiv 2210.17323).

Rounding a weight moves the layer's output. Weights of the same output that are rounded later move against it, by as
much as their inputs went together with that weight's input in a text. Inputs are taken in blocks; what goes on between
two blocks is left out.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from blockrelay.block_folder.model import GROUP
from blockrelay_converter.weight_source import F32, F64

#: Most inputs of a block. One of twice as many would take eight times as long to invert.
_BLOCK = 512
#: Added to the mean square of each input, as a part of the block's mean. The larger, the less is learned that holds for
#: the text alone: with GPTQ's own 0.01, 4-bit weights lose nearly twice as much on another language (design notes).
_DAMPING = 0.5

Grid = Callable[[F64], tuple[F32, F32]]
"""A function that returns the scale and the minimum [N] on which the next inputs' weights [inputs, N] are rounded."""


def blocks_of(depth: int) -> list[slice]:
    """Returns the blocks of `depth` inputs: of nearly equal size, each but the last a multiple of 32."""
    groups = -(-depth // GROUP)
    count = -(-groups * GROUP // _BLOCK)
    ends = [min(depth, GROUP * (groups * part // count)) for part in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def feedback_of(inputs: F64) -> list[F64]:
    """Returns how errors move on in each block of `inputs`, [K, rows] of a text, as a matrix [n, n].

    Line i holds the part of the error of input i's weight that is taken from the weight of each later input.
    """
    feedback: list[F64] = []
    for block in blocks_of(len(inputs)):
        largest = np.abs(inputs[block]).max()
        scaled = inputs[block] / largest if largest else inputs[block]  # squares stay within float64
        products = scaled @ scaled.T
        mean = float(np.trace(products)) / len(products)
        # A block whose inputs are always 0: nothing to make up for.
        products[np.diag_indices_from(products)] += _DAMPING * mean if mean else 1.0
        upper = np.linalg.cholesky(np.linalg.inv(products)).T
        feedback.append(upper / np.diagonal(upper)[:, None])
    return feedback


def round_in_order(weights: F32, feedback: Sequence[F64], grid: Grid, *, lowest: int, highest: int) -> F32:
    """Rounds the rows [N, K] of a linear layer, input after input, to integers `lowest` to `highest`, [K, N].

    `feedback` is that of the inputs that the layer will see. `grid` is asked before each group of 32 inputs, in order.
    """
    rest = np.ascontiguousarray(weights.T, np.float64)
    q = np.empty(rest.shape, np.float32)
    for block, moved in zip(blocks_of(len(rest)), feedback, strict=True):
        values = rest[block]
        for first in range(0, len(values), GROUP):
            group = slice(first, first + GROUP)
            factors = grid(values[group])
            errors = _round_group(values[group], moved[group, group], *factors, q[block][group], lowest, highest)
            values[first + GROUP :] -= moved[group, first + GROUP :].T @ errors
    return q


def _round_group(values: F64, moved: F64, scale: F32, minimum: F32, q: F32, lowest: int, highest: int) -> F64:
    """Rounds the weights [inputs, N] of a group to `q`, moves later ones, and returns the errors [inputs, N]."""
    wide, base = scale.astype(np.float64), minimum.astype(np.float64)
    inverse = np.divide(1.0, wide, out=np.zeros_like(wide), where=wide != 0)
    errors = np.empty_like(values)
    for line, value in enumerate(values):
        error = errors[line]
        np.subtract(value, base, out=error)
        error *= inverse
        np.rint(error, out=error)
        np.clip(error, lowest, highest, out=error)
        q[line] = error
        error *= wide
        error += base
        np.subtract(value, error, out=error)
        values[line + 1 :] -= moved[line, line + 1 :, None] * error
    return errors
