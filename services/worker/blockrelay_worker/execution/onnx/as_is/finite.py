"""Counts NaN and infinities in outputs of ONNX blocks, where they are a fault: masks may have minus infinity.
Pure."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def not_finite(array: NDArray[Any]) -> int:
    """Returns how many numbers of a block's output are NaN or infinite; 0 for integers and for masks."""
    if array.dtype.kind != "f":
        return 0
    finite = np.isfinite(array)
    bad = array.size - int(np.count_nonzero(finite))
    return 0 if not bad or _is_mask(array, finite) else bad


def _is_mask(array: NDArray[Any], finite: NDArray[np.bool_]) -> bool:
    """Returns whether `array` is an additive mask: minus infinity or a finite number of at most 0 everywhere, and a
    finite one in each row, which tells it from rows that overflowed."""
    return bool(
        array.ndim > 0 and np.all(finite | (array == -np.inf)) and np.all(array <= 0) and np.all(finite.any(axis=-1))
    )
