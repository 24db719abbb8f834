"""Limits of processor time and memory that the control groups of this process set (Linux cgroups, version 1 and 2).

Limits count at every level: a process has the least of what its own group and all groups above it allow, up to the root
of the mount. `root` in every function is the root of the file system; tests give a folder.
"""

from collections.abc import Iterator
from pathlib import Path

#: Folders below /sys/fs/cgroup where a controller of version 1 is mounted, as distributions name them.
_MOUNTS = {"cpu": ("cpu", "cpu,cpuacct", "cpuacct,cpu"), "memory": ("memory",)}
#: Folders where version 2 is mounted: alone, and beside version 1.
_UNIFIED = ("", "unified")
#: Fields of memory.stat with memory that the kernel reclaims before it ends a process of the group.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
#: Version 1 writes a limit of about 2**63 for "no limit".
_NO_LIMIT = 1 << 60

ROOT = Path("/")


def cpu_quota(root: Path = ROOT) -> float | None:
    """Returns how many processors' time this process may take, 1.5 for example; None without a quota."""
    quotas = [quota for group in _groups("cpu", root) if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Returns the bytes that this process and others in its groups may hold together; None without a limit."""
    limits = [limit for group in _groups("memory", root) if (limit := _limit(group)) is not None]
    return min(limits, default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Returns the bytes until the first limit is reached; None without a limit.

    Memory that the kernel can reclaim, mostly page cache, counts as free.
    """
    left = [limit - _held(group) for group in _groups("memory", root) if (limit := _limit(group)) is not None]
    return max(0, min(left)) if left else None


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folders of this process' groups with this controller, of both versions, and of the groups above."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []  # not Linux, or no /proc: the mounted folders may still have limits
    paths = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    cgroup = root / "sys/fs/cgroup"
    for mount in (cgroup / name for name in _UNIFIED):
        if (mount / "cgroup.controllers").is_file():
            yield from _levels(mount, paths.get("", "/"))
    for mount in (cgroup / name for name in _MOUNTS[controller]):
        if mount.is_dir():
            yield from _levels(mount, paths.get(controller, "/"))
            break  # the other names are links to the same folder


def _levels(mount: Path, path: str) -> Iterator[Path]:
    """Yields the folder of a group and those above it, up to `mount`.

    A container sees its own group as the root of the mount, but `path` may still begin with groups outside of it. So
    leading parts are dropped until the folder exists.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    while parts and not mount.joinpath(*parts).is_dir():
        parts = parts[1:]
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _quota(group: Path) -> float | None:
    """Returns the processors that one group allows. Version 2 has "quota period" in one file, version 1 two files."""
    both = _text(group / "cpu.max").split()
    quota, period = both if len(both) == 2 else (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if not quota.isdigit() or not period.isdigit() or not int(period):
        return None  # "max", -1, or no such files
    return int(quota) / int(period)


def _limit(group: Path) -> int | None:
    """Returns the bytes that one group allows. Above memory.high the kernel slows its processes almost to a halt."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [int(text) for name in names if (text := _text(group / name)).isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _held(group: Path) -> int:
    """Returns the bytes that a group, with the groups below it, holds and the kernel cannot reclaim.

    Version 1 counts the groups below only in the fields `total_...`.
    """
    used = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes")
    stat = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    back = sum(int(stat.get(f"total_{name}", stat.get(name, "0"))) for name in _RECLAIMABLE)
    return max(0, int(used or 0) - back)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
