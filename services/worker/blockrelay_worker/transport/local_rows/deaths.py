"""Notices at once that the process of a worker which we send to has ended, and tells the cell so: DEAD."""

import selectors
import threading

from blockrelay.observability.logs import get
from blockrelay.protocol.transitions import calls
from blockrelay_worker.transport.redis_links import Links, Stopping

#: How long `close` may have to wait for the thread. Seconds.
LOOK_S = 0.5


class Deaths(threading.Thread):
    """Watches processes until `close`. A frozen process has not ended, and one that another host runs is not seen."""

    def __init__(self, links: Links) -> None:
        super().__init__(name="deaths", daemon=True)
        self._links = links
        self._poll = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._watched: dict[int, str] = {}
        self._over = False

    def watch(self, pidfd: int, worker: str) -> None:
        """`worker` lives for no longer than that process."""
        with self._lock:
            self._watched[pidfd] = worker
            self._poll.register(pidfd, selectors.EVENT_READ, worker)

    def leave(self, pidfd: int) -> None:
        """Watch it no longer; it can be closed then."""
        with self._lock:
            if self._watched.pop(pidfd, None) is not None:
                self._poll.unregister(pidfd)

    def tell(self, worker: str) -> None:
        """Its requests run again elsewhere; nothing when somebody has said it before. Waits for Redis.

        Raises Stopping when this process should end meanwhile.
        """
        now, reruns = self._links.run_until_reachable(calls.dead(worker, silent_s=0))
        if now:
            get().warning("WORKER_ENDED", worker=worker, reruns=reruns)

    def close(self) -> None:
        self._over = True
        if self.is_alive():
            self.join()
        self._poll.close()

    def run(self) -> None:
        while not self._over:
            for key, _ in self._poll.select(LOOK_S):
                with self._lock:
                    ended = self._watched.get(key.fd) == key.data
                if not ended:
                    continue  # left meanwhile; the number may be another's now
                try:
                    self.tell(key.data)
                except Stopping:
                    return
                self.leave(key.fd)
