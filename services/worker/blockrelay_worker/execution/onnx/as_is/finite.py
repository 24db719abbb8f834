"""Which numbers of a block that others made are at fault: NaN and infinities, but for those of a mask. Pure."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def not_finite(array: NDArray[Any]) -> int:
    """How many numbers of a block's output are NaN or infinite, where that is a fault. Integers have none."""
    if array.dtype.kind != "f":
        return 0
    finite = np.isfinite(array)
    bad = array.size - int(np.count_nonzero(finite))
    return 0 if not bad or _is_mask(array, finite) else bad


def _is_mask(array: NDArray[Any], finite: NDArray[np.bool_]) -> bool:
    """An additive mask has minus infinity where nobody may look, and nothing above 0. Each of its rows lets somebody
    look somewhere, which tells it from rows that overflowed."""
    return bool(
        array.ndim > 0 and np.all(finite | (array == -np.inf)) and np.all(array <= 0) and np.all(finite.any(axis=-1))
    )
