"""Preemption: decides which runs get KV pages when too few are free, on a worker with the whole model. Pure.

Such a worker reserves no pages. Runs are ordered by age, oldest first, and take pages from younger ones. ACCEPT and
CLAIM ensure that each run fits into the pool alone: so the oldest always finishes, and then the next one does.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holding:
    """The pages of a run: the number that it `has`, and the number that its known tokens and the next one `need`."""

    request_id: str
    has: int
    need: int


def startable(oldest_first: Sequence[Holding], free: int) -> frozenset[str]:
    """Ids of the requests that may compute now.

    Runs with pages go on. Runs without pages start in order of age, if all they `need` fits into the `free` pages that
    running ones do not need: a start that must stop halfway costs pages and gives nothing. If one does not fit, no
    younger one starts either. The oldest run may always compute.
    """
    room = free - sum(max(0, h.need - h.has) for h in oldest_first if h.has)
    chosen = {h.request_id for h in oldest_first if h.has} | {h.request_id for h in oldest_first[:1]}
    for holding in oldest_first:
        if holding.has:
            continue
        if holding.need > room:
            break
        room -= holding.need
        chosen.add(holding.request_id)
    return frozenset(chosen)


def victim(oldest_first: Sequence[Holding], grower: str) -> str | None:
    """Id of the request to preempt for request `grower`: the youngest one with pages, if younger. None: wait.

    `grower` must be among `oldest_first`.
    """
    for holding in reversed(oldest_first):
        if holding.request_id == grower:
            return None
        if holding.has:
            return holding.request_id
    return None


def claimable_pages(holdings: Sequence[Holding], free: int) -> int:
    """Number of `free` pages that new jobs may take.

    Runs here keep the pages for their known tokens and the next one, and one more page each, so that a new job is not
    preempted at once.
    """
    return max(0, free - sum(max(0, h.need - h.has) + 1 for h in holdings))
