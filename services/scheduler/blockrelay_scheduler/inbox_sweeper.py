"""Inboxes on the payload Redis: rows for workers that are gone must not stay there."""

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
    """Deletes inboxes beside the scheduler's loop: a payload Redis that does not answer must delay no plan, nor that a
    silent worker is declared dead. Tries again until it does as it is told."""

    def __init__(self, payload: redis.Redis, keys: Keys, metrics: SchedulerMetrics) -> None:
        super().__init__(name="inbox sweeper", daemon=True)
        self._payload, self._keys, self._metrics = payload, keys, metrics
        self._gone: queue.SimpleQueue[frozenset[str] | None] = queue.SimpleQueue()
        self._over = threading.Event()

    def sweep(self, workers: frozenset[str]) -> None:
        """Delete theirs; returns at once. No worker ever comes back under the same name."""
        if workers:
            self._gone.put(workers)

    def close(self) -> None:
        """End the thread, whatever is left to do: an inbox that has got rows has a time to live.

        Waits for a command that is under way, so that the client may be closed behind this; not for long, as the
        process ends, and the thread with it.
        """
        self._over.set()
        self._gone.put(None)
        self.join(SWEEPER_END_S)

    def run(self) -> None:
        while (workers := self._gone.get()) and not self._over.is_set():
            self._drop([self._keys.inbox(worker) for worker in workers])

    def _drop(self, inboxes: list[str]) -> None:
        attempt = 0
        while not self._over.is_set():
            try:
                self._payload.delete(*inboxes)
                return
            except RedisTrouble as error:  # a server that cannot save its data refuses to delete any
                self._metrics.redis_errors.inc()
                if attempt == 0:
                    logs.get().warning("INBOXES_NOT_DELETED", error=str(error), inboxes=inboxes)
                self._over.wait(backoff_s(attempt))
                attempt += 1
