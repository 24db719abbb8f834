"""The share of this machine's cores that other work takes, which stands beside figures that were measured then."""

import os
import time
from pathlib import Path

LOOK_S = 1.0


def host_busy_s() -> float:
    """Seconds of all cores that were not idle; what a hypervisor took counts."""
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def busy_share() -> float:
    """The share of all cores that others take, by a look in which this process sleeps."""
    began, before = time.monotonic(), host_busy_s()
    time.sleep(LOOK_S)
    share = (host_busy_s() - before) / (time.monotonic() - began) / (os.cpu_count() or 1)
    return round(min(share, 1.0), 2)  # ticks are counted when they end
