"""Cores and model of this machine's processor, and the number of threads that make sense on it."""

import math
import os
import platform
import sys
from pathlib import Path

from blockrelay.errors import UsageError
from blockrelay.host.control_groups import ROOT, cpu_quota

#: Most threads per core that are accepted: more would only wait for each other.
THREADS_PER_CORE = 4
#: Most processes that share a stage: each needs five file descriptors in all of them.
MAX_RANKS = 16


def check_threads(threads: int | None) -> int | None:
    """Returns `threads` unless they are too many for the cores of this machine; then raises UsageError.

    It ignores quotas of processor time, which may change while the process runs.
    """
    limit = THREADS_PER_CORE * _affinity()
    if threads is not None and threads > limit:
        raise UsageError(
            f"{threads} threads are too many for the {_affinity()} cores of this machine: take at most {limit}"
        )
    return threads


def cores(*, root: Path = ROOT) -> int:
    """Returns how many cores this process may use, by its affinity and its quota of processor time; at least 1.

    A part of a core counts as a whole one: a thread that sometimes waits is better than none. `root` is for tests.
    """
    quota = cpu_quota(root)
    return _affinity() if quota is None else max(1, min(_affinity(), math.ceil(quota)))


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def cpu_facts() -> dict[str, str]:
    """Returns the fields of the first processor in /proc/cpuinfo, by name; empty on other systems than Linux."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def machine_name(threads: int, ranks: int = 1) -> str:
    """Returns the name of this machine for a profile that was measured with `threads` threads in each of `ranks`."""
    return f"{cpu_name()}, {threads} threads" + (f" in each of {ranks} ranks" if ranks > 1 else "")


def is_here(machine: str) -> bool:
    """Returns whether `machine`, a `machine_name`, has a CPU of this machine's model.

    The number of threads and ranks does not matter.
    """
    return machine.rpartition(", ")[0] == cpu_name()


def cpu_name() -> str:
    """Returns the CPU's model name."""
    return cpu_facts().get("model name") or platform.processor() or platform.machine()
