"""Deletes the inboxes of gone workers on the payload Redis: hidden states that no worker will ever read."""

import queue
import threading

import redis

from blockrelay.errors import RedisTrouble
from blockrelay.observability import logs
from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import backoff_s
from blockrelay_scheduler.policy import SWEEPER_END_S


class InboxSweeper(threading.Thread):
    """A thread that deletes inboxes, and tries again until the payload Redis has done it.

    It runs beside the scheduler's loop: a payload Redis that does not answer must delay neither a plan nor the end of
    a silent worker. `sweep` and `close` may be called from any thread.
    """

    def __init__(self, payload: redis.Redis, keys: Keys, metrics: SchedulerMetrics) -> None:
        super().__init__(name="inbox sweeper", daemon=True)
        self._payload, self._keys, self._metrics = payload, keys, metrics
        self._gone: queue.SimpleQueue[frozenset[str] | None] = queue.SimpleQueue()
        self._over = threading.Event()

    def sweep(self, workers: frozenset[str]) -> None:
        """Queues the inboxes of `workers`, given by id, for deletion; returns at once.

        They may be deleted at any later time, because no worker ever comes back under the same id.
        """
        if workers:
            self._gone.put(workers)

    def close(self) -> None:
        """Ends the thread, which must have been started, and leaves queued inboxes to their time to live.

        Waits up to SWEEPER_END_S for a command that is under way, so that the client may be closed afterwards. The
        process ends anyway, and the daemon thread with it.
        """
        self._over.set()
        self._gone.put(None)
        self.join(SWEEPER_END_S)

    def run(self) -> None:
        """Deletes what `sweep` queues, until `close`."""
        while (workers := self._gone.get()) and not self._over.is_set():
            self._drop([self._keys.inbox(worker_id) for worker_id in workers])

    def _drop(self, inboxes: list[str]) -> None:
        """Deletes inboxes, and tries again with backoff until it succeeds or `close` is called."""
        attempt = 0
        while not self._over.is_set():
            try:
                self._payload.delete(*inboxes)
                return
            except RedisTrouble as error:  # for example a server that cannot save to disk refuses every write
                self._metrics.redis_errors.inc()
                if attempt == 0:
                    logs.get().warning("INBOXES_NOT_DELETED", error=str(error), inboxes=inboxes)
                self._over.wait(backoff_s(attempt))
                attempt += 1
