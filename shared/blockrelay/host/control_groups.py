"""What the control groups of this process (cgroups of Linux, version 1 and 2) let it take.

A limit counts at every level: a process has the least of what its own group and all groups above it allow, up to the
root of what is mounted here. `root` in every function is the root of the file system; tests give a folder.
"""

from collections.abc import Iterator
from pathlib import Path

#: Folders below /sys/fs/cgroup where a controller of version 1 is mounted, as distributions name them.
_MOUNTS = {"cpu": ("cpu", "cpu,cpuacct", "cpuacct,cpu"), "memory": ("memory",)}
#: Folders where version 2 is mounted: alone, and beside version 1.
_UNIFIED = ("", "unified")
#: What the kernel takes from a group before it ends a process of it, by names in memory.stat.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
#: A limit of version 1 that is none: the largest whole number of pages.
_NO_LIMIT = 1 << 60

ROOT = Path("/")


def cpu_quota(root: Path = ROOT) -> float | None:
    """Processors' worth of time that this process may take; None without a quota."""
    quotas = [found for group in _groups("cpu", root) if (found := _quota(group)) is not None]
    return min(quotas, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that this process and those that share its groups may hold at most; None without a limit."""
    limits = [found for group in _groups("memory", root) if (found := _limit(group)) is not None]
    return min(limits, default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes until the first limit is reached, counting as free what the kernel can take back (the page cache, for
    most of it); None without a limit."""
    left = [limit - _held(group) for group in _groups("memory", root) if (limit := _limit(group)) is not None]
    return max(0, min(left)) if left else None


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of this process' groups that have this controller, of both versions, and of all groups above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []  # not Linux, or no /proc: what is mounted may still say something
    paths = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    cgroup = root / "sys/fs/cgroup"
    for mount in (cgroup / name for name in _UNIFIED):
        if (mount / "cgroup.controllers").is_file():
            yield from _levels(mount, paths.get("", "/"))
    for mount in (cgroup / name for name in _MOUNTS[controller]):
        if mount.is_dir():
            yield from _levels(mount, paths.get(controller, "/"))
            break  # the other names are links to the same


def _levels(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a group and those above it, up to `mount`.

    A container sees its own group as the root of the mount, and its path may still begin with groups that lie outside
    of it: the first part of the path that is not there is left out, then the next.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    while parts and not mount.joinpath(*parts).is_dir():
        parts = parts[1:]
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _quota(group: Path) -> float | None:
    """The processors of one level. Version 2 has "quota period" in one file, version 1 a file for each."""
    both = _text(group / "cpu.max").split()
    quota, period = both if len(both) == 2 else (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if not quota.isdigit() or not period.isdigit() or not int(period):
        return None  # "max", -1, or no such files
    return int(quota) / int(period)


def _limit(group: Path) -> int | None:
    """The bytes of one level. Above memory.high the kernel slows a process down until it stands still."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [int(text) for name in names if (text := _text(group / name)).isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _held(group: Path) -> int:
    """Bytes that a level holds and that cannot be taken back. Version 1 has the groups below only in `total_` names."""
    used = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes")
    stat = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    back = sum(int(stat.get(f"total_{name}", stat.get(name, "0"))) for name in _RECLAIMABLE)
    return max(0, int(used or 0) - back)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
