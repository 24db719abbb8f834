"""Passes the requests of a first stage on to other workers, a few at a time, so that none stands still for long.

All at once would wait for one another in the other worker, which has to compute, or load, the KV of each first.
"""

import time
from typing import Any, cast

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
        self._forget_those_that_go_on()
        rows = sum(rows for _, rows in self._under_way.values())
        for run in self._table.all():
            if rows and rows + len(run.tokens) > HAND_OVER_ROWS:
                return
            rows += len(run.tokens)
            self._under_way[run.request_id] = (len(run.tokens) - run.prompt_length, len(run.tokens))
            self._endings.rerun(run.request_id, run.run_id, "drain")

    def _forget_those_that_go_on(self) -> None:
        """Leaves only requests under way that have neither ended nor got a token since they were handed over."""
        if not self._under_way:
            return

        def read() -> list[list[bytes | None]]:
            ask = self._links.control.pipeline(transaction=False)
            for request_id in self._under_way:
                ask.hmget(self._links.keys.request(request_id), "state", "committed")
            return cast(Any, ask.execute())

        answers = self._links.retry_until_reachable(read, "read requests")
        self._under_way = {
            request_id: (known, rows)
            for (request_id, (known, rows)), (state, committed) in zip(self._under_way.items(), answers, strict=True)
            if state in (b"queued", b"running") and int(committed or 0) <= known
        }
