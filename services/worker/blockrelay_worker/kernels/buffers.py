"""Large buffers: page aligned, zero, and without physical memory until they are touched."""

import contextlib
import mmap
import sys

import numpy as np
from numpy.typing import NDArray

#: Size and alignment of a huge page where it is worth asking for one (x86-64, and aarch64 with 4 KiB pages).
_HUGE_PAGE = 2 << 20


def huge_page_bytes(size: int) -> NDArray[np.uint8]:
    """Like `untouched_bytes`, aligned for and, if the system can, made of huge pages: for what is read all the time."""
    if sys.platform != "linux" or size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return untouched_bytes(size)
    mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + size]


def untouched_bytes(size: int) -> NDArray[np.uint8]:
    """`size` bytes of private anonymous memory; freed with the last array that refers to it."""
    if sys.platform == "win32":
        mapping = mmap.mmap(-1, max(size, 1))
    else:
        # Python's default is shared memory, which gets no huge pages and is counted against the container's shm.
        mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(mapping, dtype=np.uint8, count=size)
