"""How many stages of a route compute at the same time: into so many groups its decode rows are split.

Stages with cores of their own work on different groups at once. Stages that share their cores would only read their
weights more often: there the whole batch goes from one to the next.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a worker computes: the host by name, its cores, and how many of them the worker's threads use."""

    node: str
    cores: int
    threads: int


def groups_of(seats: Sequence[Seat]) -> int:
    """Micro-batches for a route over these workers: as many as its stages can compute at once; at least 1."""
    hosts: dict[str, list[Seat]] = defaultdict(list)
    for seat in seats:
        hosts[seat.node].append(seat)
    return sum(_at_once(on_host) for on_host in hosts.values()) or 1


def _at_once(seats: list[Seat]) -> int:
    cores, threads = max(s.cores for s in seats), sum(s.threads for s in seats)
    return max(1, min(len(seats), cores * len(seats) // max(1, threads)))


def decode_share(flights: Sequence[int | None], groups: int) -> int:
    """How many decode rows the first stage may take now, so that `groups` batches circulate, equal in size.

    `flights`: for each request that decodes the batch that carries it through the other stages, None if its token is
    back. While `groups` batches are under way nothing leaves: what is back waits for its group. Without that, batches
    that began apart stay apart, and every one of them reads all weights for its few rows.
    """
    if len({batch for batch in flights if batch is not None}) >= groups:
        return 0
    return max(1, -(-len(flights) // groups))
