"""How much of a row of logits comes to who chooses a token from it, so that not all of a vocabulary has to. Pure.

Who wants a token says by a Need what it depends on. A device may then give the largest logits in place of the whole
row: where these decide which tokens can be drawn, and by what weights, the draw among them is that from the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: The most logits of a row that are given in its place.
MOST = 256
#: How far a device's sum over a row may be off, as a part of it: twice what 2,048 additions of float32 cost at worst.
TOTAL_ERROR = 2.0**-12


@dataclass(frozen=True, slots=True)
class Need:
    """What one token is chosen by, as of SamplingParams. Temperature 0 is the largest logit; otherwise at least one of
    `top_k` up to MOST, `top_p` below 1 and `min_p` above 0 keeps tokens away."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True, eq=False)
class Largest:
    """The largest logits of a row, of equal ones those of lower ids: `ids` ascending, and what is the logit of each.

    `total` is what exp((logit - best) / temperature) of the whole row adds up to, within TOTAL_ERROR of it.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    total: float = 1.0


#: A whole row, float32 [vocab], or what is enough of one.
LogitRow = NDArray[np.float32] | Largest
LogitRows = NDArray[np.float32] | Sequence[LogitRow]


def enough(need: Need, values: NDArray[np.float32], total: float) -> bool:
    """Whether the largest logits of a row, `values` in descending order, decide which tokens are kept, and so the draw.

    `values` are the first `need.top_k` or more of a row with more of them. False where it is too close to call.
    """
    if need.greedy:
        return True
    if need.top_k:
        return _apart(float(values[need.top_k - 1]), float(values[0]), need.temperature)
    with np.errstate(over="ignore"):
        weights = np.exp((values.astype(np.float64) - float(values[0])) / need.temperature)
    if need.top_p == 1:
        return bool(weights[-1] < need.min_p * (1 - TOTAL_ERROR))
    reached, wanted = np.cumsum(weights), need.top_p * total
    if not np.all(np.abs(reached - wanted) > wanted * 2 * TOTAL_ERROR) or reached[-1] < wanted:  # not a number: no
        return False
    return _apart(float(values[np.searchsorted(reached, wanted)]), float(values[0]), need.temperature)


def _apart(value: float, best: float, temperature: float) -> bool:
    """Whether the next smaller float32 still has another weight in float64. Not so near 0: then more tokens than we
    have may tie with `value`, and a lower id would go before it."""
    return abs(value) * 2.0**24 > max(best - value, temperature)
