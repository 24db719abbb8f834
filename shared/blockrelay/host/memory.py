"""Memory of the machine, and of this process, whose container may allow it less than the machine has."""

import ctypes
import os
import sys
from pathlib import Path

from blockrelay.host.control_groups import ROOT, memory_left, memory_limit


def available_bytes(*, root: Path = ROOT) -> int:
    """Returns the bytes that can be allocated without swapping and within the limits of the control groups.

    Other systems than Linux do not say; then it is half of all memory. `root` is for tests.
    """
    left = memory_left(root)
    free = _meminfo(root / "proc/meminfo")
    return free if left is None else min(free, left)


def allowed_bytes(*, root: Path = ROOT) -> int:
    """Returns the bytes that this process may hold at most: all memory, or the control groups' limit if that is less.

    `root` is for tests.
    """
    limit = memory_limit(root)
    return total_bytes() if limit is None else min(total_bytes(), limit)


def resident_bytes() -> int:
    """Returns the bytes of memory that this process holds; 0 on other systems than Linux."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def anonymous_bytes() -> int:
    """Returns the bytes of memory that this process holds, without mapped files and shared memory.

    The kernel drops pages of mapped files when memory is short. Returns 0 on other systems than Linux.
    """
    if sys.platform != "linux":
        return 0
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def total_bytes() -> int:
    """Returns the bytes of memory of the machine."""
    if sys.platform == "win32":
        status = _MemoryStatus(size=ctypes.sizeof(_MemoryStatus))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return int(status.total)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 6),
    )


def _meminfo(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return total_bytes() // 2
