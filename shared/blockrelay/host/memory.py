"""How much memory the machine has, and how much this process may still take (its container may be allowed less)."""

import ctypes
import os
import sys
from pathlib import Path

from blockrelay.host.control_groups import ROOT, memory_left, memory_limit


def available_bytes(*, root: Path = ROOT) -> int:
    """Bytes that can be taken without swapping and without passing a limit of the control groups.

    Half of all memory where the system does not say. `root` is for tests.
    """
    left = memory_left(root)
    free = _meminfo(root / "proc/meminfo")
    return free if left is None else min(free, left)


def allowed_bytes(*, root: Path = ROOT) -> int:
    """Bytes that this process may hold at most: the machine's memory, or the limit of the control groups if that is
    less. `root` is for tests."""
    limit = memory_limit(root)
    return total_bytes() if limit is None else min(total_bytes(), limit)


def resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def anonymous_bytes() -> int:
    """Of this process, files that are mapped aside: those go where others need the room. 0 as of `resident_bytes`."""
    if sys.platform != "linux":
        return 0
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def total_bytes() -> int:
    """Of the machine."""
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
