"""Sends rows to the next stage, and new tokens back to the first stage. Messages are sent once and may be lost.

Rows, or named tensors, are one message per batch and target. It goes through shared memory to a worker of this host,
else as an inbox entry on the payload Redis.
"""

import time
from collections.abc import Sequence
from typing import Any, cast

from blockrelay.errors import RedisFull, RedisTrouble
from blockrelay.failpoints import reach
from blockrelay.observability import logs
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.messages import Commit, Forward, NextJob
from blockrelay.redis.client import backoff_s
from blockrelay_worker.policy import FULL_INBOX_MESSAGES, ROWS_WAIT_S
from blockrelay_worker.transport.local_rows.links import LocalLinks
from blockrelay_worker.transport.redis_links import Links


class StageSender:
    """Sends a stage's messages to other workers. Used by the engine thread only."""

    def __init__(self, links: Links, metrics: WorkerMetrics, local: LocalLinks | None = None) -> None:
        """`local` sends to workers of this host; None if all messages go through Redis."""
        self._links, self._metrics, self._local = links, metrics, local
        self._full: set[str] = set()

    def forward(self, target: str, message: Forward) -> bool:
        """Sends rows to the worker `target` of the next stage.

        False, and the caller must RERUN, if it is dead, has no room for ROWS_WAIT_S seconds, or the payload Redis
        fails. The rows may have arrived nevertheless. Raises Stopping when the process should end while a worker is
        looked up or reported as dead.
        """
        with self._links.clock.waiting():
            return self._send(target, message)

    def announce(self, commits: Sequence[tuple[str, Commit]]) -> None:
        """Sends first workers (route[0] of each commit's run, given by id) the tokens that are about to be committed.

        They can compute on while COMMIT is under way, as a worker of the whole model does. It is only a hint: COMMIT
        sends the tokens too. If a commit is refused, its run ends and with it what the hint started. If one Redis
        serves as control and payload, its answer would wait for the disk as COMMIT does: then nothing is sent through
        Redis. A failure of the payload Redis is only counted. Raises Stopping when the process should end meanwhile.
        """
        if self._local is None and self._links.payload is self._links.control:
            return
        try:
            reach("worker.before_early_job")
            with self._links.clock.waiting():
                self._send_jobs(commits)
            reach("worker.after_early_job")
        except RedisTrouble as error:
            self._links.watch.count_error(error)

    def full_targets(self) -> frozenset[str]:
        """Ids of workers whose inbox is full now. Checks only those whose inbox was full when rows were sent.

        An inbox that the payload Redis cannot measure counts as not full. Raises Stopping when the process should end
        meanwhile.
        """
        for target in list(self._full):
            try:
                with self._links.clock.waiting():
                    length = self._local.unread(target) if self._local else None
                    if length is None:
                        length = self._links.payload.xlen(self._links.keys.inbox(target))
            except RedisTrouble as error:
                self._links.watch.count_error(error)
                length = 0
            if length < FULL_INBOX_MESSAGES:
                self._full.discard(target)
        return frozenset(self._full)

    def _send_jobs(self, commits: Sequence[tuple[str, Commit]]) -> None:
        """Sends the tokens of commits; drops those for a worker of this host without room now. Raises RedisTrouble."""
        pipeline = self._links.payload.pipeline(transaction=False)
        for worker_id, c in commits:
            job = NextJob(request_id=c.request_id, run_id=c.run_id, position=c.position, tokens=c.tokens).encode()
            if self._local is not None and self._local.takes(worker_id, {"next_job": job}):
                self._local.send(worker_id, {"next_job": job}, 0.0)
            elif self._links.payload is not self._links.control:
                pipeline.xadd(self._links.keys.inbox(worker_id), {"next_job": job}, nomkstream=True)
        if len(pipeline):
            pipeline.execute()

    def _send(self, target: str, message: Forward) -> bool:
        """Sends rows by the target's way; notes a full inbox. False if they did not arrive, which is logged."""
        fields = message.encode()
        try:
            if self._local is not None and self._local.takes(target, fields):
                way, why = "local", "it is gone, or takes no rows"
                reach("worker.before_forward")
                arrives = self._local.send(target, fields, ROWS_WAIT_S)
                length = self._local.unread(target)
                reach("worker.after_forward")
            else:
                way, why = "redis", "it has no inbox"
                entry, length = self._add(self._links.keys.inbox(target), fields)
                arrives = entry is not None
        except RedisTrouble as error:
            self._links.watch.count_error(error)
            return False
        arrives = arrives and length is not None  # else it may have left before it took them
        if length is not None and length >= FULL_INBOX_MESSAGES:
            self._full.add(target)
        if arrives:
            self._metrics.forwarded.labels(way).inc(sum(len(value) for name, value in fields.items() if name != "head"))
        else:
            requests = [segment.request_id for segment in message.segments]
            logs.get().warning("FORWARD_UNDELIVERED", worker=target, requests=requests, error=why)
        return arrives

    def _add(self, inbox: str, fields: dict[str, bytes]) -> tuple[bytes | None, int]:
        """Adds an entry to an inbox. Returns its id (None: there is no such inbox) and the inbox's length.

        Retries for ROWS_WAIT_S if Redis is full: computed rows are worth the wait. Raises RedisTrouble.
        """
        give_up, attempt = time.monotonic() + ROWS_WAIT_S, 0
        while True:
            try:
                reach("worker.before_forward")
                pipeline = self._links.payload.pipeline(transaction=False)
                pipeline.xadd(inbox, cast(Any, fields), nomkstream=True)
                pipeline.xlen(inbox)
                entry, length = pipeline.execute()
                reach("worker.after_forward")
                return entry, length
            except RedisFull as error:
                self._links.watch.count_error(error)
                if time.monotonic() > give_up or self._links.stop.wait(backoff_s(attempt)):
                    raise
                attempt += 1
