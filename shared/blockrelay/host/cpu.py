"""The processor of this machine."""

import math
import os
import platform
import sys
from pathlib import Path

from blockrelay.errors import UsageError
from blockrelay.host.control_groups import ROOT, cpu_quota

#: More threads than so many for each core only wait for each other.
THREADS_PER_CORE = 4


def check_threads(threads: int | None) -> int | None:
    """`threads`, if this machine has a use for so many; any quota may change. Raises UsageError."""
    most = THREADS_PER_CORE * _affinity()
    if threads is not None and threads > most:
        raise UsageError(
            f"{threads} threads are too many for the {_affinity()} cores of this machine: take at most {most}"
        )
    return threads


def cores(*, root: Path = ROOT) -> int:
    """Cores this process may use: those of its affinity, fewer where a quota of processor time is less, and at least
    one. A part of a core counts as one: a thread that waits now and then does more than none. `root` is for tests."""
    quota = cpu_quota(root)
    return _affinity() if quota is None else max(1, min(_affinity(), math.ceil(quota)))


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def cpu_facts() -> dict[str, str]:
    """What the system says of its first processor, by name; empty where it does not say."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def machine_name(threads: int) -> str:
    """What a profile with so many threads says of the machine that it was measured on."""
    return f"{cpu_name()}, {threads} threads"


def is_here(machine: str) -> bool:
    """Whether a `machine_name` is of a CPU like this one, with any number of threads."""
    return machine.rpartition(", ")[0] == cpu_name()


def cpu_name() -> str:
    """For people."""
    return cpu_facts().get("model name") or platform.processor() or platform.machine()
