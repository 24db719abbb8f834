"""Compares the logits of a format with those of float32. Pure.

The KL divergence of a position is the sum over tokens t of p(t) (ln p(t) - ln q(t)), p being float32's probabilities.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Rows that are computed at once: 64 rows of 50,000 tokens are 25 MB in float64.
_ROWS = 64
Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over positions: -ln p of the text's tokens, KL divergence (both in nats), and equal most likely tokens."""

    positions: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0
    kl: float = 0.0
    same_top: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            positions=self.positions + other.positions,
            nll=self.nll + other.nll,
            reference_nll=self.reference_nll + other.reference_nll,
            kl=self.kl + other.kl,
            same_top=self.same_top + other.same_top,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a format on a text."""

    perplexity: float
    cost: float
    """The share by which the perplexity is above float32's; negative if it is below."""
    kl: float
    """Mean KL divergence from float32, in nats."""
    same_top: float
    """The share of positions where the most likely token is float32's."""


def figures_of(sums: Sums) -> Figures:
    """Returns the means of at least one position."""
    return Figures(
        perplexity=math.exp(sums.nll / sums.positions),
        cost=math.exp((sums.nll - sums.reference_nll) / sums.positions) - 1,
        kl=sums.kl / sums.positions,
        same_top=sums.same_top / sums.positions,
    )


def compared(reference: Logits, logits: Logits, targets: Sequence[int]) -> Sums:
    """Returns the sums of a window; row i of both arrays [positions, vocabulary] predicts `targets[i]`."""
    total = Sums()
    for first in range(0, len(targets), _ROWS):
        rows = slice(first, first + _ROWS)
        expected, found = _log_softmax(reference[rows]), _log_softmax(logits[rows])
        own = (np.arange(len(expected)), np.asarray(targets[rows]))
        total += Sums(
            positions=len(expected),
            nll=-float(found[own].sum()),
            reference_nll=-float(expected[own].sum()),
            kl=float((np.exp(expected) * (expected - found)).sum()),
            same_top=int((reference[rows].argmax(1) == logits[rows].argmax(1)).sum()),
        )
    return total


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
