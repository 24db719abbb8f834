"""Large buffers: page aligned, filled with zeros, and without physical memory until they are touched."""

import contextlib
import mmap
import sys

import numpy as np
from numpy.typing import NDArray

#: Size and alignment of a huge page in bytes (x86-64, and aarch64 with 4 KiB pages).
_HUGE_PAGE = 2 << 20


def huge_page_bytes(size: int) -> NDArray[np.uint8]:
    """Returns `size` zero bytes, aligned to huge pages and made of them if the system can: for data read all the time.

    Small buffers, and all on systems without huge pages, are as `untouched_bytes` makes them.
    """
    if sys.platform != "linux" or size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return untouched_bytes(size)
    mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + size]


def untouched_bytes(size: int) -> NDArray[np.uint8]:
    """Returns `size` zero bytes of private anonymous memory, freed with the last array that refers to it."""
    if sys.platform == "win32":
        mapping = mmap.mmap(-1, max(size, 1))
    else:
        # Python's default is shared memory, which gets no huge pages and counts against the container's shm limit.
        mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(mapping, dtype=np.uint8, count=size)
