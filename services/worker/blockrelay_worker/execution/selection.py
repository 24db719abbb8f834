"""The part of a row of logits that the sampler needs, so that a device need not copy the whole vocabulary. Pure.

A Need states what the choice of one token depends on. A device may then return only the largest logits of a row. Where
these decide which tokens can be drawn and with which weights, the draw is the same as from the whole row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Most logits that are returned in place of a whole row.
MAX_LARGEST = 256
#: Relative error allowed in a device's sum over a row: twice the worst case of 2,048 additions of float32.
TOTAL_ERROR = 2.0**-12


class Need(NamedTuple):
    """Sampling parameters that decide which logits the choice of one token needs (see SamplingParams).

    Temperature 0 needs the largest logit. Otherwise at least one of `top_k` up to MAX_LARGEST, `top_p` below 1 and
    `min_p` above 0 excludes tokens. A tuple, so that a message to a device's process holds it as it is.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        """True if the token with the largest logit is chosen."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True, eq=False)
class Largest:
    """The largest logits of a row; of equal logits those with lower ids.

    `ids` are ascending token ids, `logits` the logit of each. `total` is the sum of
    exp((logit - largest) / temperature) over the whole row, with a relative error of TOTAL_ERROR at most. For a greedy
    Need there is one id, and neither its logit (0) nor `total` (1) is the row's.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    total: float = 1.0


#: A whole row of logits, float32 [vocab], or the largest of it.
LogitRow = NDArray[np.float32] | Largest
#: Rows of logits: all of them whole, float32 [n, vocab], or each as it is needed.
LogitRows = NDArray[np.float32] | Sequence[LogitRow]


def enough(need: Need, values: NDArray[np.float32], total: float) -> bool:
    """Returns whether the largest logits of a row decide which tokens are kept, and so the draw.

    `values` are the largest logits, descending, at least `need.top_k` of them; `total` is that of `Largest`. Returns
    False where rounding errors leave the result open.
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
    if not np.all(np.abs(reached - wanted) > wanted * 2 * TOTAL_ERROR) or reached[-1] < wanted:  # also for NaN
        return False
    return _apart(float(values[np.searchsorted(reached, wanted)]), float(values[0]), need.temperature)


def _apart(value: float, best: float, temperature: float) -> bool:
    """Returns whether the next float32 below `value` has a smaller weight in float64.

    Near 0 it may not: tokens that were not returned may then tie with `value`, and one with a lower id would win.
    """
    return abs(value) * 2.0**24 > max(best - value, temperature)
