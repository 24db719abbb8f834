"""Requests that may have killed workers are computed alone, and their name is written down first.

If the worker dies meanwhile, DEAD reads who was in quarantine and blames nobody else. CLAIM writes the name too, so
that a request whose mere arrival kills is found.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blockrelay.protocol.constants import QUARANTINE_S
from blockrelay_worker.engine.run import Run
from blockrelay_worker.scheduling.work import Work
from blockrelay_worker.transport.redis_links import Links


def is_quarantined(work: Work[Run]) -> bool:
    """Whether it is computed without neighbours, and announced: the death of the worker is then its own fault."""
    return work.position < work.run.identity.quarantined_until


def separated(work: Sequence[Work[Run]]) -> list[list[Work[Run]]]:
    """`work` as the batches that may be computed together: everything in quarantine for itself, first."""
    alone, together = [w for w in work if is_quarantined(w)], [w for w in work if not is_quarantined(w)]
    return [[w] for w in alone] + ([together] if together else [])


class Quarantine:
    """Writes down whom this worker computes alone. Waits for Redis; raises Stopping when the process should end."""

    def __init__(self, links: Links, worker: str) -> None:
        self._links, self._key = links, links.keys.quarantine(worker)
        #: Who is computed alone just now.
        self.now = ""

    @contextmanager
    def of(self, request: str) -> Iterator[None]:
        """While it lasts, the death of this worker is this request's. An exception inside leaves the mark: the process
        ends."""
        self._links.retry_until_reachable(
            lambda: self._links.control.set(self._key, request, ex=QUARANTINE_S), "quarantine"
        )
        self.now = request
        yield
        self.now = ""
        self.clear()

    def clear(self) -> None:
        """Nobody is in quarantine any more: what CLAIM named has arrived unharmed, or its rows are computed."""
        self._links.retry_until_reachable(lambda: self._links.control.delete(self._key), "quarantine")
