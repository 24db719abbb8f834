"""Measures the share of this machine's cores that other work takes; it is reported with other figures."""

import os
import time
from pathlib import Path

LOOK_S = 1.0


def host_busy_s() -> float:
    """Returns the seconds for which cores were not idle since the start of the machine, with time that a hypervisor
    took."""
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def busy_share() -> float:
    """Returns the share of all cores that other programs take, measured while this process sleeps for LOOK_S."""
    began, before = time.monotonic(), host_busy_s()
    time.sleep(LOOK_S)
    share = (host_busy_s() - before) / (time.monotonic() - began) / (os.cpu_count() or 1)
    return round(min(share, 1.0), 2)  # it may exceed 1: ticks are counted when they end
