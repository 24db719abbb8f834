"""Binds ranks to the NUMA nodes of the machine: a rank's threads, and so its memory, stay on one node.

Linux gives a page of memory to the node of the thread that touches it first. Threads and processes begin with the
processors of the thread that starts them.
"""

import os
import sys
from collections.abc import Mapping, Set
from contextlib import suppress
from functools import cache
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def bind(rank: int, ranks: int, *, root: Path = _NODES) -> None:
    """Binds this thread, and what it starts from now on, to the node of a rank.

    Does nothing on a machine with one node. `root` is for tests.
    """
    if sys.platform != "linux":
        return
    own = cpus_of(rank, ranks, nodes(root), _allowed())
    if own:
        with suppress(OSError):  # the system allows other processors only: they serve too
            os.sched_setaffinity(0, own)


@cache
def _allowed() -> frozenset[int]:
    """Returns the processors that this process might use before its first thread was bound; none if not on Linux."""
    return frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else frozenset()


def cpus_of(rank: int, ranks: int, found: Mapping[int, Set[int]], allowed: Set[int]) -> frozenset[int]:
    """Returns the processors of a rank; empty where there is nothing to choose. Pure.

    Neighbouring ranks share a node where there are more ranks than nodes. `allowed`: processors that the process may
    use; nodes without any of them do not count.
    """
    usable = [frozenset(cpus & allowed) for _, cpus in sorted(found.items()) if cpus & allowed]
    if len(usable) < 2 or ranks < 2:
        return frozenset()
    return usable[rank * len(usable) // ranks]


def nodes(root: Path) -> dict[int, frozenset[int]]:
    """Returns the processors of each NUMA node by its number; empty where the system does not tell."""
    found: dict[int, frozenset[int]] = {}
    for folder in root.glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            found[int(folder.name.removeprefix("node"))] = parse_list((folder / "cpulist").read_text())
    return found


def parse_list(text: str) -> frozenset[int]:
    """Returns the numbers of a list as Linux writes it: `0-3,8`. Raises ValueError for another text."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
