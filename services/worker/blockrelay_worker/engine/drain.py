"""How a worker that was told to end leaves: nothing new comes, what is here ends, and the rest goes on elsewhere."""

from blockrelay.observability.logs import get
from blockrelay.protocol.transitions import calls
from blockrelay_worker.transport.redis_links import Links


def close(links: Links, worker: str) -> None:
    """From now on no route takes `worker`."""
    record = links.keys.worker(worker)
    if links.retry_until_reachable(lambda: links.control.exists(record), "drain"):  # else it was declared dead
        links.retry_until_reachable(lambda: links.control.hset(record, "draining", 1), "drain")


class Departure:
    """Used by the engine thread only. Waits for Redis; raises Stopping when the time to drain is over meanwhile."""

    def __init__(self, links: Links, worker: str) -> None:
        self._links, self._worker, self._told = links, worker, False

    def over(self, runs: int) -> bool:
        """Whether none of the `runs` is left, none is on its way. From the first call on no route takes this worker."""
        if not self._told:
            close(self._links, self._worker)
            self._told = True
            get().info("DRAIN_STARTED", worker=self._worker, runs=runs)
        return not runs and not self._links.run_until_reachable(calls.beat(self._worker))
