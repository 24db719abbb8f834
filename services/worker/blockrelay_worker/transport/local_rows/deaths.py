"""Detects that a target worker's process on this host has ended, and reports it to the cell with DEAD."""

import selectors
import threading

from blockrelay.observability.logs import get
from blockrelay.protocol.transitions import calls
from blockrelay_worker.transport.redis_links import Links, Stopping

#: Seconds between two checks of the thread whether it should end: `close` waits for the next one.
LOOK_S = 0.5


class Deaths(threading.Thread):
    """Watches processes of this host from `start` until `close`, in a thread. A frozen process does not count as ended.

    Making one raises OSError if the system has no more file descriptors.
    """

    def __init__(self, links: Links) -> None:
        super().__init__(name="deaths", daemon=True)
        self._links = links
        self._poll = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._watched: dict[int, str] = {}
        self._over = False

    def watch(self, pidfd: int, worker_id: str) -> None:
        """Watches a process by its pidfd: when it ends, the worker is reported as dead, and no longer watched.

        The pidfd stays the caller's, who calls `leave` before closing it. It must not be watched already.
        """
        with self._lock:
            self._watched[pidfd] = worker_id
            self._poll.register(pidfd, selectors.EVENT_READ, worker_id)

    def leave(self, pidfd: int) -> None:
        """Stops watching a pidfd; the caller may close it then. Does nothing if it is not watched."""
        with self._lock:
            if self._watched.pop(pidfd, None) is not None:
                self._poll.unregister(pidfd)

    def tell(self, worker_id: str) -> None:
        """Reports a worker as dead, so that its requests run again elsewhere; no effect if it was reported before.

        Waits for Redis; raises Stopping when this process should end meanwhile.
        """
        is_new, reruns = self._links.run_until_reachable(calls.dead(worker_id, silent_s=0))
        if is_new:
            get().warning("WORKER_ENDED", worker=worker_id, reruns=reruns)

    def close(self) -> None:
        """Ends the thread; takes up to LOOK_S seconds, or until a report under way has its answer from Redis.

        `watch` must not be called afterwards.
        """
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
                    continue  # no longer watched; the descriptor's number may have been reused
                try:
                    self.tell(key.data)
                except Stopping:
                    return
                self.leave(key.fd)
