"""Requests that may have killed workers are computed alone, and their name is written down first.

If the worker dies meanwhile, DEAD reads who was tried and blames nobody else. CLAIM writes the name too, so that a
request whose mere arrival kills is found.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blockrelay_worker.engine.work import Work
from blockrelay_worker.transport.redis_links import Links

#: A name that nobody takes back is void after so long. Seconds; longer than any step may take.
TRIAL_S = 600


def apart(work: Sequence[Work]) -> list[list[Work]]:
    """`work` as the batches that may be computed together: everything tried alone for itself, first."""
    alone, together = [w for w in work if w.alone], [w for w in work if not w.alone]
    return [[w] for w in alone] + ([together] if together else [])


class Trials:
    """Writes down whom this worker tries. Waits for Redis; raises Stopping when the process should end meanwhile."""

    def __init__(self, links: Links, worker: str) -> None:
        self._links, self._key = links, links.keys.trying(worker)

    @contextmanager
    def of(self, request: str) -> Iterator[None]:
        """While it lasts, the death of this worker is this request's. What is raised inside ends the process too."""
        self._links.again(lambda: self._links.control.set(self._key, request, ex=TRIAL_S), "trial")
        yield
        self.over()

    def over(self) -> None:
        """Nobody is tried any more: what CLAIM named has arrived unharmed, or its rows are computed."""
        self._links.again(lambda: self._links.control.delete(self._key), "trial")
