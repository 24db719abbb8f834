"""Reports the end of worker processes to the cell at once, so that their requests run again within milliseconds."""

import threading
import time
from collections.abc import Callable
from typing import Literal

from blockrelay.errors import RedisTrouble, RedisUnavailable, ServiceUnavailable
from blockrelay.host.identity import process_prefix
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import Scripts, backoff_s, connect
from blockrelay.redis.errors import SAY_EVERY_S
from blockrelay.redis.registry import worker_ids
from blockrelay.settings import Settings
from blockrelay_launcher.policy import DEATH_REPORT_CLOSE_S, FORGET_WORKERS_S


class DeathReports(threading.Thread):
    """A thread that calls the script DEAD for the workers of ended processes, and retries until Redis takes it.

    It is a thread of its own so that a Redis that does not answer delays no restart of a child. The scheduler deletes
    the workers' inboxes on the payload Redis.
    """

    def __init__(self, settings: Settings, control_url: str, say: Callable[[str], None]) -> None:
        """Makes the thread for the cell that `settings` name, whose control Redis is at `control_url`.

        `say` prints a line for the user when reports must wait: at once, then every 10 s, and when they are done.
        """
        super().__init__(name="death reports", daemon=True)
        self._keys = Keys(settings.cell)
        self._control = connect(control_url, cell=settings.cell)
        self._scripts = Scripts(self._control, self._keys)
        self._say, self._said_at = say, float("-inf")
        self._changed = threading.Condition()
        self._ended: set[int] = set()  # processes whose end is not reported yet
        self._over = False

    def forget_workers(self) -> None:
        """Removes all registered workers: they belong to an earlier `up` on the same data and have ended.

        Call it before this `up` starts workers, and only for an embedded Redis: another one has workers of other hosts.
        Their requests run again, and their deaths count against no request. If Redis takes no writes, the scheduler
        finds them by their missing heartbeats. Raises ServiceUnavailable if Redis, which answered before, is gone.
        """
        give_up, attempt = time.monotonic() + FORGET_WORKERS_S, 0
        while True:
            try:
                for worker_id in worker_ids(self._control, self._keys):
                    self._report(worker_id, "forgotten")
                return
            except RedisUnavailable as error:
                if time.monotonic() > give_up:
                    raise ServiceUnavailable("the control Redis answered at first and does not any more") from error
                time.sleep(backoff_s(attempt))
                attempt += 1
            except RedisTrouble as error:
                if error.code != "PROTOCOL":  # then the scheduler upgrades the cell, and later misses their heartbeats
                    self._say(f"the workers of the run before cannot be forgotten yet: {error}")
                return

    def add(self, pid: int) -> None:
        """Queues the report that process `pid` of this host has ended. Returns at once; for any thread."""
        with self._changed:
            self._ended.add(pid)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all deaths are reported. Returns False if `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._ended, timeout_s)

    def close(self) -> None:
        """Ends the thread. The scheduler finds unreported deaths by missing heartbeats."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self.is_alive():
            self.join(DEATH_REPORT_CLOSE_S)
        self._control.close()

    def run(self) -> None:
        """Reports deaths until `close`; Thread calls it."""
        attempt, ended = 0, set[int]()
        while ended := self._next(attempt, ended):
            try:
                mine = tuple(map(process_prefix, ended))
                for worker_id in worker_ids(self._control, self._keys):
                    if worker_id.startswith(mine):
                        self._report(worker_id, "death")
            except RedisTrouble as error:
                self._wait_with(len(ended), error)
                attempt += 1
            else:
                self._done(ended)
                attempt = 0

    def _next(self, attempt: int, tried: set[int]) -> set[int]:
        """Waits for ended processes and returns those that are not reported; none after `close`.

        After a failed attempt for `tried` (`attempt` > 0) it first waits for a while, or for one more end.
        """
        with self._changed:
            if attempt:
                self._changed.wait_for(lambda: self._over or self._ended - tried, backoff_s(attempt))
            self._changed.wait_for(lambda: self._over or self._ended)
            return set() if self._over else set(self._ended)

    def _wait_with(self, count: int, error: RedisTrouble) -> None:
        if time.monotonic() - self._said_at >= SAY_EVERY_S:
            self._said_at = time.monotonic()
            self._say(f"the end of {count} worker(s) cannot be reported yet: {error}")

    def _done(self, ended: set[int]) -> None:
        if self._said_at > float("-inf"):
            self._said_at = float("-inf")
            self._say(f"the end of {len(ended)} worker(s) is reported")
        with self._changed:
            self._ended -= ended
            self._changed.notify_all()

    def _report(self, worker_id: str, reason: Literal["death", "forgotten"]) -> None:
        self._scripts.run(calls.dead(worker_id, silent_s=0, reason=reason))
