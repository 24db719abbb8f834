"""What this stage does for requests that ask for a trace, written to the payload Redis. Lossy: no step waits for it."""

import threading
import time
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, cast

from blockrelay.errors import RedisTrouble
from blockrelay.observability.logs import get
from blockrelay.protocol.constants import TRACE_S, TRACE_STEPS
from blockrelay.protocol.encoding.stage_span import Kind, StageSpan
from blockrelay.redis.errors import CommandError
from blockrelay_worker.transport.redis_links import Links

#: How long the thread gathers what it writes at once. Seconds.
GATHER_S = 0.05
#: Steps that wait at most.
KEPT = 4096
#: How long a payload Redis that failed, or is fuller than this, is left alone. Rows and results need the rest.
PAUSE_S, FULL_SHARE = 5.0, 0.5
#: How often the clock of the control Redis is compared with ours, and in how many tries; the quickest counts.
COMPARE_S, TRIES = 30.0, 3

_Told = tuple[str, StageSpan]


@dataclass(slots=True, eq=False)
class RunTrace:
    """Of a run whose request asked: how many of its `steps` were told, and since when its next rows can be computed
    here (monotonic). `run` counts the runs of the request from 1."""

    run: int
    ready_ns: int
    steps: int = 0

    def ready(self) -> None:
        """From now on."""
        self.ready_ns = time.monotonic_ns()


class StageSpans(threading.Thread):
    """`tell` from one thread. What cannot be written is lost, with one line in the log until something was written."""

    def __init__(self, links: Links, *, worker: str, stage: int, first: int, last: int) -> None:
        super().__init__(name="stage spans", daemon=True)
        self._links, self._closed = links, threading.Event()
        self._worker, self._stage, self._first, self._last = worker, stage, first, last
        self._queue: SimpleQueue[_Told | None] = SimpleQueue()
        self._offset_us, self._compare_at, self._paused_until = 0, float("-inf"), float("-inf")
        self._losing = False

    def tell(
        self, request: str, trace: RunTrace, kind: Kind, *, position: int, rows: int, batch_rows: int,
        began_ns: int, ended_ns: int,
    ) -> None:  # fmt: skip
        """One step for a request. Times on the monotonic clock. Does not wait. Mutates `trace`."""
        ready_ns = min(trace.ready_ns, began_ns)
        span = StageSpan(
            run=trace.run,
            worker=self._worker,
            stage=self._stage,
            first=self._first,
            last=self._last,
            number=trace.steps,
            kind=kind,
            position=position,
            rows=rows,
            batch_rows=batch_rows,
            ready_us=ready_ns // 1000,
            waited_us=began_ns // 1000 - ready_ns // 1000,
            computed_us=ended_ns // 1000 - began_ns // 1000,
        )
        trace.steps += 1
        trace.ready_ns = ended_ns
        if self._queue.qsize() < KEPT:
            self._queue.put((request, span))

    def run(self) -> None:
        while (told := self._queue.get()) is not None:
            self._closed.wait(GATHER_S)
            batch = [told]
            try:
                while (more := self._queue.get_nowait()) is not None:
                    batch.append(more)
            except Empty:
                pass
            else:
                self._queue.put(None)
            self._write(batch)

    def close(self) -> None:
        """Write what waits and end; who stands before a Redis that does not answer is not waited for."""
        self._closed.set()
        self._queue.put(None)
        self.join(1.0)

    def _write(self, batch: list[_Told]) -> None:
        if time.monotonic() < self._paused_until:
            return
        trouble = ""
        try:
            offset_us = self._offset()
            pipeline = self._links.payload.pipeline(transaction=False)
            for request, span in batch:
                fields = replace(span, ready_us=span.ready_us + offset_us).encode()
                name = self._links.keys.trace(request)
                pipeline.xadd(name, cast(Any, fields), maxlen=TRACE_STEPS, approximate=False)
            for request in {request for request, _ in batch}:
                pipeline.expire(self._links.keys.trace(request), TRACE_S)
            pipeline.info("memory")
            memory = pipeline.execute()[-1]
            if memory.get("maxmemory") and memory["used_memory"] > FULL_SHARE * memory["maxmemory"]:
                trouble = f"the payload Redis uses more than {FULL_SHARE:.0%} of its memory"
        except (RedisTrouble, CommandError) as error:  # the latter: somebody has touched the key, and it is no truth
            self._links.watch.count(1)
            trouble = str(error)
        if trouble:
            self._paused_until = time.monotonic() + PAUSE_S
            if not self._losing:
                get().warning("STAGE_SPANS_LOST", error=trouble)
        self._losing = bool(trouble)

    def _offset(self) -> int:
        """What makes Unix microseconds of the control Redis' clock of ours. Raises RedisTrouble."""
        if time.monotonic() < self._compare_at:
            return self._offset_us
        compared: list[tuple[int, int]] = []
        for _ in range(TRIES):
            asked = time.monotonic_ns()
            seconds, micros = cast(Any, self._links.control.time())
            took = time.monotonic_ns() - asked
            compared.append((took, seconds * 1_000_000 + micros - (asked + took // 2) // 1000))
        _, self._offset_us = min(compared)
        self._compare_at = time.monotonic() + COMPARE_S
        return self._offset_us
