"""Large buffers: page aligned, zero, and without physical memory until they are touched."""

import mmap
import sys

import numpy as np
from numpy.typing import NDArray


def untouched_bytes(size: int) -> NDArray[np.uint8]:
    """`size` bytes of private anonymous memory; freed with the last array that refers to it."""
    if sys.platform == "win32":
        mapping = mmap.mmap(-1, max(size, 1))
    else:
        # Python's default is shared memory, which gets no huge pages and is counted against the container's shm.
        mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(mapping, dtype=np.uint8, count=size)
