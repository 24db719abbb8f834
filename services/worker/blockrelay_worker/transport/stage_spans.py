"""Writes this stage's spans, for requests that ask for a trace, to the payload Redis. Lossy: no step waits for it."""

import threading
import time
from dataclasses import replace
from typing import Any, cast

from blockrelay.errors import RedisTrouble
from blockrelay.observability.logs import get
from blockrelay.protocol.constants import TRACE_S, TRACE_STEPS
from blockrelay.protocol.encoding.stage_span import StageSpan
from blockrelay.redis.errors import CommandError
from blockrelay_worker.policy import CLOCK_COMPARE_S, CLOCK_TRIES, GATHER_S, SPANS_FULL_SHARE, SPANS_KEPT, SPANS_PAUSE_S
from blockrelay_worker.transport.mailbox import Mailbox
from blockrelay_worker.transport.redis_links import Links

#: A request's id, and one of its spans.
_Item = tuple[str, StageSpan]


class StageSpans(threading.Thread):
    """Writes spans in a thread; one other thread calls `put`.

    Spans that cannot be written are lost. The log gets one line for the first ones, and another only after a success.
    """

    def __init__(self, links: Links) -> None:
        super().__init__(name="stage spans", daemon=True)
        self._links, self._closed = links, threading.Event()
        self._queue = Mailbox[_Item | None]()
        self._offset_us, self._compare_at, self._paused_until = 0, float("-inf"), float("-inf")
        self._losing = False

    def put(self, request_id: str, span: StageSpan) -> None:
        """Queues a span of request id `request_id`; dropped if SPANS_KEPT spans wait. Does not wait.

        Its `ready_us` is on the monotonic clock of this host.
        """
        if self._queue.qsize() < SPANS_KEPT:
            self._queue.put((request_id, span))

    def run(self) -> None:
        items: list[_Item | None] = []
        while None not in items:
            first = self._queue.get()
            self._closed.wait(GATHER_S)
            items = [first, *self._queue.take(0)]
            if batch := [item for item in items if item is not None]:
                self._write(batch)

    def close(self) -> None:
        """Writes what waits and ends the thread; does not wait longer than 1 s if Redis does not answer.

        Needs `start`.
        """
        self._closed.set()
        self._queue.put(None)
        self.join(1.0)

    def _write(self, batch: list[_Item]) -> None:
        """Writes spans to the payload Redis, or drops them during a pause; a failure begins one."""
        if time.monotonic() < self._paused_until:
            return
        trouble = ""
        try:
            offset_us = self._offset()
            pipeline = self._links.payload.pipeline(transaction=False)
            for request_id, span in batch:
                fields = replace(span, ready_us=span.ready_us + offset_us).encode()
                name = self._links.keys.trace(request_id)
                pipeline.xadd(name, cast(Any, fields), maxlen=TRACE_STEPS, approximate=False)
            for request_id in {request_id for request_id, _ in batch}:
                pipeline.expire(self._links.keys.trace(request_id), TRACE_S)
            pipeline.info("memory")
            memory = pipeline.execute()[-1]
            if memory.get("maxmemory") and memory["used_memory"] > SPANS_FULL_SHARE * memory["maxmemory"]:
                trouble = f"the payload Redis uses more than {SPANS_FULL_SHARE:.0%} of its memory"
        except (RedisTrouble, CommandError) as error:  # CommandError: a user changed the key by hand; traces may go
            self._links.watch.count(1)
            trouble = str(error)
        if trouble:
            self._paused_until = time.monotonic() + SPANS_PAUSE_S
            if not self._losing:
                get().warning("STAGE_SPANS_LOST", error=trouble)
        self._losing = bool(trouble)

    def _offset(self) -> int:
        """Microseconds to add to this host's monotonic clock for the control Redis' Unix time. Raises RedisTrouble."""
        if time.monotonic() < self._compare_at:
            return self._offset_us
        compared: list[tuple[int, int]] = []
        for _ in range(CLOCK_TRIES):
            start_ns = time.monotonic_ns()
            seconds, micros = cast(Any, self._links.control.time())
            took_ns = time.monotonic_ns() - start_ns
            compared.append((took_ns, seconds * 1_000_000 + micros - (start_ns + took_ns // 2) // 1000))
        _, self._offset_us = min(compared)
        self._compare_at = time.monotonic() + CLOCK_COMPARE_S
        return self._offset_us
