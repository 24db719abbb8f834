"""Spans of traced runs on their way to the payload Redis: lost if they cannot be written, and no step waits."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.encoding.stage_span import StageSpan
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import connect
from blockrelay_worker.engine.step_reports import StepReports
from blockrelay_worker.runs.run import RunTrace
from blockrelay_worker.scheduling.work import Work
from blockrelay_worker.transport import stage_spans
from blockrelay_worker.transport.stage_spans import StageSpans
from tests.support.cell import Cell
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.support.worker.links import links_of
from tests.support.worker.runs import new_run
from tests.support.worker.stage_role import stage_role

Tell = Callable[..., None]
SPAN = StageSpan(
    run=2, worker_id="w", stage=1, first=3, last=4, number=0, kind="decode", position=0, rows=1, batch_rows=3,
    ready_us=0, waited_us=0, computed_us=5,
)  # fmt: skip


@pytest.fixture
def payload(tmp_path: Path) -> Iterator[RedisServer]:
    """A payload Redis of its own."""
    server = RedisServer(tmp_path, durable=False).start()
    yield server
    server.stop()


@contextmanager
def telling(cell: Cell, payload: RedisServer) -> Iterator[Tell]:
    """`tell(steps, request="q")` puts spans; all that can be written is written at the end."""
    links = links_of(cell, payload=connect(payload.url, cell=cell.keys.cell))
    spans = StageSpans(links)
    spans.start()

    def tell(steps: int, request_id: str = "q") -> None:
        for number in range(steps):
            now_us = time.monotonic_ns() // 1000
            spans.put(request_id, replace(SPAN, number=number, position=number, ready_us=now_us))

    try:
        yield tell
    finally:
        spans.close()
        assert not spans.is_alive()
        links.payload.close()


def steps_in(client: redis.Redis, keys: Keys, request_id: str = "q") -> list[StageSpan]:
    entries: Any = client.xrange(keys.trace(request_id))
    return [StageSpan.decode(fields) for _, fields in entries]


def test_steps_are_written_in_order_on_the_clock_of_the_control_redis(cell: Cell, payload: RedisServer) -> None:
    def now_us() -> int:
        seconds, micros = cell.client.time()  # pyright: ignore
        return int(seconds) * 1_000_000 + int(micros)  # pyright: ignore

    before = now_us()
    with telling(cell, payload) as tell:
        tell(5)
        tell(1, "another")
    after = now_us()
    with payload.client() as other:
        steps = steps_in(other, cell.keys)
        assert [step.number for step in steps] == [step.position for step in steps] == list(range(5))
        assert replace(steps[0], ready_us=0) == SPAN
        took_us = after - before  # no error of the comparison is longer than that
        assert all(before - took_us <= step.ready_us <= step.ended_us <= after + took_us for step in steps)
        assert len(steps_in(other, cell.keys, "another")) == 1
        assert 0 < other.ttl(cell.keys.trace("q")) <= 900  # pyright: ignore


def test_a_step_waits_since_the_one_before_unless_its_rows_came_later(w8a8: BlockFolder) -> None:
    role = stage_role(w8a8, "w", split="1-2,3-5", stage=0, first=1, last=2)
    reports = StepReports(role, None, "m")  # pyright: ignore[reportArgumentType]
    item = Work(run=new_run("q", [7]), position=0, tokens=[7], samples=True)
    trace = item.run.trace = RunTrace(run=1, ready_ns=1_000_000)
    for began, ready in ((3_000_000, None), (9_000_000, None), (20_000_000, 16_000_000), (29_000_000, 30_000_000)):
        trace.ready_ns = ready or trace.ready_ns
        reports._trace([item], 1, began, began + 2_000_000)  # pyright: ignore[reportPrivateUsage]
    told = reports._stage_spans._queue.take(0)  # pyright: ignore[reportPrivateUsage]
    assert [(step.number, step.waited_us, step.computed_us) for _, step in filter(None, told)] == [
        (0, 2000, 2000), (1, 4000, 2000), (2, 4000, 2000), (3, 0, 2000)
    ]  # fmt: skip
    assert {(step.kind, step.blocks, step.worker_id, step.run) for _, step in filter(None, told)} == {
        ("decode", "1-2", "w", 1)
    }


def test_of_very_many_steps_the_newest_stay(cell: Cell, payload: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_spans, "TRACE_STEPS", 10)
    with telling(cell, payload) as tell:
        tell(25)
    with payload.client() as other:
        assert [step.number for step in steps_in(other, cell.keys)] == list(range(15, 25))


@pytest.mark.parametrize("trouble", ["away", "full", "another type"])
def test_what_cannot_be_written_is_lost_with_one_line(
    cell: Cell, payload: RedisServer, trouble: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(stage_spans, "SPANS_PAUSE_S", 0.0)
    with payload.client() as other:
        if trouble == "full":
            other.config_set("maxmemory", int(other.info("memory")["used_memory"] * 1.5))  # pyright: ignore
        elif trouble == "another type":
            other.set(cell.keys.trace("q"), "x", ex=60)
        else:
            payload.stop()
    writes, tried = StageSpans._write, list[int]()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(StageSpans, "_write", lambda self, batch: tried.append(writes(self, batch) or len(batch)))  # pyright: ignore
    with capture_logs() as logs, telling(cell, payload) as tell:
        for times in (1, 2, 3):
            tell(1)
            wait_until(partial(lambda times: len(tried) == times, times), "it was tried")
    assert [line["event"] for line in logs] == ["STAGE_SPANS_LOST"]


def test_while_the_payload_redis_is_left_alone_nothing_is_written(cell: Cell, payload: RedisServer) -> None:
    with payload.client() as other:
        other.config_set("maxmemory", int(other.info("memory")["used_memory"] * 1.5))  # pyright: ignore
        with capture_logs() as logs, telling(cell, payload) as tell:
            tell(1)
            wait_until(lambda: len(logs) == 1, "it has seen that the server is half full")
            tell(1, "later")
        assert len(steps_in(other, cell.keys)) == 1 and not steps_in(other, cell.keys, "later")
