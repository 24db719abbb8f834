"""Rounds the weights of a linear layer to 8 bits, with a scale for each column (w8a8)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blockrelay_converter.quantisation.gptq import round_in_order
from blockrelay_converter.weight_source import F32, F64

_MOST = 127


def quantise_columns(weights: F32, feedback: Sequence[F64] = ()) -> tuple[NDArray[np.int8], F32]:
    """Rounds the rows of a linear layer, float32 [N, K], to columns of int8 [K, N] and their scales, float32 [N].

    scale = max|w| / 127, or 1 for an all-zero column; q = round to even(w / scale), each step in float32. With the
    layer's `feedback` (`gptq.feedback_of`) each weight first makes up for the errors before it, in float64.
    """
    scale = np.abs(weights).max(axis=1) / np.float32(_MOST)
    scale[scale == 0] = 1.0
    if feedback:
        minimum = np.zeros_like(scale)
        moved = round_in_order(weights, feedback, lambda _: (scale, minimum), lowest=-_MOST, highest=_MOST)
        return moved.astype(np.int8), scale
    q = np.rint(weights / scale[:, None]).clip(-_MOST, _MOST).astype(np.int8)
    return q.T, scale
