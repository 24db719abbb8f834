"""The root of a file system in which control groups say what a test wants them to."""

from collections.abc import Mapping
from pathlib import Path

GIB = 1 << 30


def write_groups(root: Path, own: str, groups: Mapping[str, Mapping[str, str | int]], *, unified: bool = True) -> Path:
    """`own` is what /proc/self/cgroup says; `groups`: a folder below /sys/fs/cgroup -> its files. `unified`: version 2
    is mounted there."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(own)
    cgroup = root / "sys/fs/cgroup"
    cgroup.mkdir(parents=True, exist_ok=True)
    if unified:
        (cgroup / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    for folder, files in groups.items():
        (cgroup / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (cgroup / folder / name).write_text(f"{text}\n")
    return root


def write_free(root: Path, kib: int) -> Path:
    """What /proc/meminfo says is available."""
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:   {kib} kB\n")
    return root
