"""Large buffers: page aligned, filled with zeros, and without physical memory until they are touched."""

import contextlib
import errno
import mmap
import sys

import numpy as np
from numpy.typing import NDArray

#: Size and alignment of a huge page in bytes (x86-64, and aarch64 with 4 KiB pages).
_HUGE_PAGE = 2 << 20


def huge_page_bytes(size: int) -> NDArray[np.uint8]:
    """Returns `size` zero bytes, aligned to huge pages and made of them if the system can: for data read all the time.

    Raises MemoryError. Small buffers, and all on systems without huge pages, are as `untouched_bytes` makes them.
    """
    if sys.platform != "linux" or size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return untouched_bytes(size)
    mapping = _private_memory(size + _HUGE_PAGE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + size]


def untouched_bytes(size: int) -> NDArray[np.uint8]:
    """Returns `size` zero bytes of private anonymous memory, freed with the last array that refers to it.

    Raises MemoryError where the system gives no more.
    """
    return np.frombuffer(_private_memory(max(size, 1)), dtype=np.uint8, count=size)


def _private_memory(size: int) -> mmap.mmap:
    """Returns private anonymous memory. Raises MemoryError where the system gives no more."""
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, size)
        # Python's default is shared memory, which gets no huge pages and counts against the container's shm limit.
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"the system gives no {size} bytes of memory") from error
