"""Micro-batches: decode tokens are split into as many groups as stages of the route can compute at the same time.

Stages with cores of their own work on different groups at once. If stages share cores, groups would only read the
weights more often: then the whole batch goes from one stage to the next.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerCores:
    """The place where a worker computes: its host's name and cores, and the number of the worker's threads."""

    node: str
    cores: int
    threads: int


def groups_of(workers: Sequence[WorkerCores]) -> int:
    """Number of micro-batches for a route over these workers: stages that can compute at once; at least 1.

    On a host with n of the workers these are n * cores / (all threads of the n), rounded down, from 1 to n.
    """
    hosts: dict[str, list[WorkerCores]] = defaultdict(list)
    for worker in workers:
        hosts[worker.node].append(worker)
    return sum(_at_once(on_host) for on_host in hosts.values()) or 1


def _at_once(workers: list[WorkerCores]) -> int:
    cores, threads = max(s.cores for s in workers), sum(s.threads for s in workers)
    return max(1, min(len(workers), cores * len(workers) // max(1, threads)))


def decode_share(flights: Sequence[int | None], groups: int) -> int:
    """Number of decode tokens that the first stage may take now, so that `groups` batches of equal size circulate.

    `flights`: for each decoding request the number of the batch that carries it through the other stages, None if its
    token is back. `groups` is at least 1. While `groups` batches are under way the answer is 0: tokens that are back
    wait for their group. Otherwise batches that began apart would stay apart, and each would read all weights for a few
    tokens.
    """
    if len({batch for batch in flights if batch is not None}) >= groups:
        return 0
    return max(1, -(-len(flights) // groups))
