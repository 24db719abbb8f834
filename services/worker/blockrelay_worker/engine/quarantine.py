"""Quarantine: a request that may have killed workers is computed alone, after its id was written to Redis.

If the worker dies meanwhile, DEAD reads the id and blames that request alone. CLAIM writes the id too: so a request
that kills the worker on arrival is identified.
"""

from collections.abc import Sequence

from blockrelay.protocol.constants import QUARANTINE_S
from blockrelay_worker.scheduling.work import Work
from blockrelay_worker.transport.redis_links import Links


def is_quarantined(work: Work) -> bool:
    """True if these rows must be computed alone, with the request's id in the quarantine record meanwhile."""
    return work.position < work.run.quarantined_until


def separated(work: Sequence[Work]) -> list[list[Work]]:
    """Splits `work` into batches: first one for each quarantined request, then one with all others."""
    alone, together = [w for w in work if is_quarantined(w)], [w for w in work if not is_quarantined(w)]
    return [[w] for w in alone] + ([together] if together else [])


class Quarantine:
    """The worker's quarantine record in Redis. Methods wait for Redis; they raise Stopping at the process's end."""

    def __init__(self, links: Links, worker_id: str) -> None:
        self._links, self._key = links, links.keys.quarantine(worker_id)
        #: Id of the request that is computed alone now; "": none.
        self.now = ""

    def enter(self, request_id: str) -> None:
        """Puts the request's id into the record: a death of this worker, until `leave`, counts against the request.

        The record expires after QUARANTINE_S seconds.
        """
        self._links.retry_until_reachable(
            lambda: self._links.control.set(self._key, request_id, ex=QUARANTINE_S), "quarantine"
        )
        self.now = request_id

    def leave(self) -> None:
        """Ends the quarantine of the request `now`, whose rows are computed, and deletes the record."""
        self.now = ""
        self.clear()

    def clear(self) -> None:
        """Deletes the record: the claimed request arrived without harm, or its rows are computed."""
        self._links.retry_until_reachable(lambda: self._links.control.delete(self._key), "quarantine")
