"""Who gets pages when there are too few: pure decisions of a worker that runs the whole model and reserves nothing.

Runs are ordered by age, oldest first. The oldest takes pages from everybody younger, and ACCEPT and CLAIM saw to it
that it fits the pool alone: so it always finishes, and then the next one does.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holding:
    """A run and its pages: how many it `has`, and how many its known tokens and the next one `need` in all."""

    request: str
    has: int
    need: int


def startable(oldest_first: Sequence[Holding], free: int) -> frozenset[str]:
    """Runs that may compute now.

    Those with pages go on. One without starts in order of age, when all its known tokens fit into what is free beside
    what the running ones lack: a start that is bound to stop halfway costs pages and gives nothing. The oldest of all
    always may.
    """
    room = free - sum(max(0, h.need - h.has) for h in oldest_first if h.has)
    chosen = {h.request for h in oldest_first if h.has} | {h.request for h in oldest_first[:1]}
    for holding in oldest_first:
        if holding.has:
            continue
        if holding.need > room:
            break
        room -= holding.need
        chosen.add(holding.request)
    return frozenset(chosen)


def victim(oldest_first: Sequence[Holding], grower: str) -> str | None:
    """Whose pages `grower` gets: the youngest with pages among those younger than it. None: `grower` waits."""
    for holding in reversed(oldest_first):
        if holding.request == grower:
            return None
        if holding.has:
            return holding.request
    return None


def claimable_pages(holdings: Sequence[Holding], free: int) -> int:
    """How many of the `free` pages new jobs may have: what the runs here need for known tokens and the next is theirs,
    and one page more for each, so that a new job is not preempted at once."""
    return max(0, free - sum(max(0, h.need - h.has) + 1 for h in holdings))
