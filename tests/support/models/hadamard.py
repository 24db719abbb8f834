"""Hadamard matrices by their definition."""

import numpy as np
from numpy.typing import NDArray


def hadamard(size: int) -> NDArray[np.float64]:
    """[size, size] of ones and minus ones: (-1) to the number of bits that both indexes have."""
    signs = [[-1.0 if (row & column).bit_count() % 2 else 1.0 for column in range(size)] for row in range(size)]
    return np.array(signs)
