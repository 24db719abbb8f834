"""Rows to the next stage, and tokens back to the first: transport, not truth. Sent once.

Rows are one inbox entry per batch and target.
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
from blockrelay_worker.transport.redis_links import Links

#: Entries in a target's inbox beyond which prompt chunks for it wait; decode rows still go.
FULL_INBOX = 8
#: How long rows that are computed wait for a payload Redis that is full; then their requests run again. Seconds.
FULL_RETRY_S = 2.0


class Sender:
    def __init__(self, links: Links, metrics: WorkerMetrics) -> None:
        self._links, self._metrics = links, metrics
        self._full: set[str] = set()

    def forward(self, target: str, message: Forward) -> bool:
        """Send rows to a worker of the next stage. False when it is dead or the payload Redis away: RERUN."""
        with self._links.clock.waiting():
            return self._send(target, message)

    def announce(self, commits: Sequence[tuple[str, Commit]]) -> None:
        """Tell first workers (route[0] of each commit's run) the tokens that are about to be committed.

        So they compute on while COMMIT is under way, as a worker of the whole model does. Only a hint: COMMIT sends the
        job itself, and what a commit that is refused has started goes the way of its run. Without a payload Redis of
        its own it would wait for the disk as COMMIT does: then nothing is sent.
        """
        if self._links.payload is self._links.control:
            return
        try:
            reach("worker.before_early_job")
            pipeline = self._links.payload.pipeline(transaction=False)
            for worker, c in commits:
                job = NextJob(request=c.request, run=c.run, position=c.position, tokens=c.tokens).encode()
                pipeline.xadd(self._links.keys.inbox(worker), {"next_job": job}, nomkstream=True)
            with self._links.clock.waiting():
                pipeline.execute()
            reach("worker.after_early_job")
        except RedisTrouble as error:
            self._links.watch.met(error)

    def full_targets(self) -> frozenset[str]:
        """Workers whose inbox is full right now; asks only about those that were full at the last sending."""
        for target in list(self._full):
            try:
                with self._links.clock.waiting():
                    length = self._links.payload.xlen(self._links.keys.inbox(target))
            except RedisTrouble as error:
                self._links.watch.met(error)
                length = 0
            if length < FULL_INBOX:
                self._full.discard(target)
        return frozenset(self._full)

    def _send(self, target: str, message: Forward) -> bool:
        inbox, fields = self._links.keys.inbox(target), message.encode()
        try:
            entry, length = self._add(inbox, fields)
        except RedisTrouble as error:
            self._links.watch.met(error)
            return False
        self._metrics.forwarded.inc(len(fields["rows"]))
        if length >= FULL_INBOX:
            self._full.add(target)
        if entry is None:
            requests = [segment.request for segment in message.segments]
            logs.get().warning("FORWARD_UNDELIVERED", worker=target, requests=requests, error="it has no inbox")
        return entry is not None

    def _add(self, inbox: str, fields: dict[str, bytes]) -> tuple[bytes | None, int]:
        """The new entry (None: there is no such inbox) and the inbox's length.

        A Redis that is full is tried again for a while: what is computed is worth waiting for. Raises RedisTrouble.
        """
        give_up, attempt = time.monotonic() + FULL_RETRY_S, 0
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
                self._links.watch.met(error)
                if time.monotonic() > give_up or self._links.stop.wait(backoff_s(attempt)):
                    raise
                attempt += 1
