"""Draining of a worker: no new route takes it, its runs end here, and what is left at the end runs elsewhere."""

from blockrelay.observability.logs import get
from blockrelay.protocol.transitions import calls
from blockrelay_worker.transport.redis_links import Links


def close(links: Links, worker_id: str) -> None:
    """Marks the worker as draining in its registry record, so that no new route takes it.

    Waits for Redis; raises Stopping when the process should end meanwhile.
    """
    record = links.keys.worker(worker_id)
    if links.retry_until_reachable(lambda: links.control.exists(record), "drain"):  # else it was declared dead
        links.retry_until_reachable(lambda: links.control.hset(record, "draining", 1), "drain")


class Departure:
    """Drains one worker. Used by the engine thread only.

    Waits for Redis; raises Stopping when the time to drain is over meanwhile.
    """

    def __init__(self, links: Links, worker_id: str) -> None:
        self._links, self._worker_id, self._closed = links, worker_id, False

    def over(self, runs: int) -> bool:
        """True when none of the `runs` on this worker is left and Redis knows none on its way here.

        The first call marks the worker as draining: from then on no new route takes it.
        """
        if not self._closed:
            close(self._links, self._worker_id)
            self._closed = True
            get().info("DRAIN_STARTED", worker=self._worker_id, runs=runs)
        return not runs and not self._links.run_until_reachable(calls.heartbeat(self._worker_id))
