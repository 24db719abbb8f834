"""Chooses the powers of two that divide the input channels of a linear layer, by the error of its output (SmoothQuant).

Source: Xiao et al. 2023.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockrelay_converter.quantisation.smoothing_scales import Exponents

#: Shares of a channel's magnitude that move into the weights (alpha in the paper): 0 none, 1 all of it.
SHARES = (0.25, 0.5, 0.75, 1.0)
#: Smoothing must lower the error to at most this share of it; a smaller gain is noise of the calibration text.
_WORTH = 0.95
#: Limit of an exponent's magnitude. float32 and the float16 of KV pages keep their precision over far more than this.
_LARGEST = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothed:
    """The chosen exponents of one linear layer, and the relative errors of its output.

    `exponents` has one entry per channel that does not share another's. `before` and `after` are |rounded output -
    output| / |output| over the measured rows, without and with smoothing. `share` is the one of SHARES that was chosen.
    It is None, and both errors are equal, if no smoothing is worth it.
    """

    exponents: Exponents
    before: float
    after: float
    share: float | None


def smooth(
    inputs: NDArray[np.float32],
    largest_input: NDArray[np.float64],
    largest_weight: NDArray[np.float32],
    channels: NDArray[np.intp],
    weights: Iterable[NDArray[np.float32]],
    rounding: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    *,
    group: int = 0,
) -> Smoothed:
    """Tries every share on the rows `inputs` [R, K] and returns the exponents with the smallest error.

    Without a share that lowers the error by 5 % or more, all exponents are 0. Inputs are divided by 2**exponent, and
    the weights that read them multiplied.

    `largest_input` and `largest_weight` [K] are the largest magnitudes of each channel (over all calibration rows) and
    of the weights that read it. `channels` [K] has for each channel the index of its exponent, from 0 without a gap;
    channels with equal indexes share one. `weights` are the rows of the layer in pieces [n, K]. `rounding` rounds such
    a piece as the block folder does. Rows are rounded in groups of `group` inputs; 0: each as one.
    """
    own_input, own_weight = (np.zeros(int(channels.max()) + 1) for _ in range(2))
    np.maximum.at(own_input, channels, largest_input)
    np.maximum.at(own_weight, channels, largest_weight)
    tried = [np.zeros(own_input.size, np.int32), *(exponents_for(own_input, own_weight, share) for share in SHARES)]
    expanded = [exponents[channels] for exponents in tried]
    rounded = [_rounded(np.ldexp(inputs, -exponents), group) for exponents in expanded]
    errors, total = np.zeros(len(tried)), 0.0
    for piece in weights:
        exact = inputs @ piece.T
        total += float(np.square(exact, dtype=np.float64).sum())
        for index, (exponents, rows) in enumerate(zip(expanded, rounded, strict=True)):
            output = rows @ rounding(np.ldexp(piece, exponents)).T
            errors[index] += float(np.square(output - exact, dtype=np.float64).sum())
    relative = np.sqrt(errors / total) if total else errors
    best = int(relative.argmin())
    if relative[best] > _WORTH * relative[0]:
        best = 0
    return Smoothed(
        exponents=tried[best],
        before=float(relative[0]),
        after=float(relative[best]),
        share=SHARES[best - 1] if best else None,
    )


def exponents_for(largest_input: NDArray[np.float64], largest_weight: NDArray[np.float64], share: float) -> Exponents:
    """Returns an exponent per channel, [C]: log2(input**share / weight**(1 - share)) less its median, rounded.

    It is limited to -12..12. `largest_input` and `largest_weight` are the largest magnitudes of each channel and of the
    weights that read it. Subtracting the median leaves most channels unchanged. A channel that is always zero, or that
    no weight reads, gets 0.
    """
    used = (largest_input > 0) & (largest_weight > 0)
    exponents = np.zeros(largest_input.size, np.int32)
    if used.any():
        wanted = share * np.log2(largest_input[used]) - (1 - share) * np.log2(largest_weight[used])
        exponents[used] = np.rint(wanted - np.median(wanted)).clip(-_LARGEST, _LARGEST)
    return exponents


def _rounded(rows: NDArray[np.float32], group: int) -> NDArray[np.float32]:
    """Returns the rows [R, K] after rounding to 8 bits, each group in steps of its largest magnitude / 127."""
    parts = rows.reshape(-1, group or rows.shape[1])
    scale = np.abs(parts).max(axis=1, keepdims=True) * np.float32(1 / 127) + np.float32(1e-12)
    return (np.rint(parts / scale) * scale).reshape(rows.shape)
