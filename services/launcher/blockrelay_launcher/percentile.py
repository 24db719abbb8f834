"""The definition of a percentile that `bench`, `drill` and the scripts in bench/ share."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest of `values` that at least `share` (0 < share <= 1) of them do not exceed.

    `values` may have any order and must not be empty.
    """
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]
