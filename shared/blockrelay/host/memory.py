"""How much memory the machine has, and how much this process may still take (its container may be allowed less)."""

import ctypes
import os
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(*, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes that can be taken without swapping and without passing the limit of the control group.

    Half of all memory where the system does not say. The arguments are for tests.
    """
    free = _meminfo(meminfo)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    return free if limit is None else max(0, min(free, limit - (used or 0)))


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


def _number(path: Path) -> int | None:
    """The number in a file of the control group; None for "max", and where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
