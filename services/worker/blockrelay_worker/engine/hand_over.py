"""Passes the requests of a first stage on to other workers, a few at a time, so that none stands still for long.

All at once would wait for one another in the other worker, which has to compute, or load, the KV of each first.
"""

import time

from blockrelay_worker.engine.run_endings import Endings
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.policy import HAND_OVER_LOOK_S, HAND_OVER_ROWS
from blockrelay_worker.transport.redis_links import Links


class HandOver:
    """The hand-over of all runs of a draining first stage. Used by the engine thread only.

    Waits for Redis; raises Stopping when the process should end meanwhile.
    """

    def __init__(self, table: RunTable, links: Links, endings: Endings) -> None:
        self._table, self._links, self._endings = table, links, endings
        self._under_way: dict[str, tuple[int, int]] = {}  # by request id: tokens in its log, and tokens to compute
        self._looked = float("-inf")  # monotonic

    def go_on(self) -> None:
        """Queues the next runs again, the oldest first, unless those before them have not gone on elsewhere yet.

        Runs of HAND_OVER_ROWS tokens together are under way at once, or one run with more. Looks at Redis every
        HAND_OVER_LOOK_S seconds at most.
        """
        now = time.monotonic()
        if not len(self._table) or now - self._looked < HAND_OVER_LOOK_S:
            return
        self._looked = now
        if self._under_way:
            self._under_way = {name: one for name, one in self._under_way.items() if self._is_waiting(name, one[0])}
        rows = sum(rows for _, rows in self._under_way.values())
        for run in self._table.all():
            if rows and rows + len(run.tokens) > HAND_OVER_ROWS:
                return
            rows += len(run.tokens)
            self._under_way[run.request_id] = (len(run.tokens) - run.prompt_length, len(run.tokens))
            self._endings.rerun(run.request_id, run.run_id, "drain")

    def _is_waiting(self, request_id: str, known: int) -> bool:
        """Returns whether a request that was handed over with `known` tokens has not ended, and has no further one."""
        key = self._links.keys.request(request_id)
        state, committed = self._links.retry_until_reachable(
            lambda: self._links.control.hmget(key, "state", "committed"), "read request"
        )
        return state in (b"queued", b"running") and int(committed or 0) <= known
