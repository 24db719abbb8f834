"""How rows of a run that a later stage has not seen yet put it on the table."""

import threading
from typing import Any, cast

import numpy as np
import pytest
import redis
from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import EndEntry, Forward
from blockrelay.redis.client import Scripts
from blockrelay.redis.errors import RedisWatch
from blockrelay_worker.engine.intake import Intake
from blockrelay_worker.engine.run import Run
from blockrelay_worker.engine.run_table import RunTable
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.transport.redis_links import Links
from tests.support.cell import Cell
from tests.support.worker.stage_role import stage_role


@pytest.fixture
def cell(client: redis.Redis, keys: Keys, scripts: Scripts) -> Cell:
    cell = Cell(client, keys, scripts)
    for stage, name in enumerate("ab"):
        cell.worker(name, stage=stage, split="1-2,3-5")
    return cell


@pytest.fixture
def intake(w8a8: BlockFolder, client: redis.Redis, keys: Keys, scripts: Scripts) -> Intake:
    """Those of the last stage."""
    role = stage_role(w8a8, "b", split="1-2,3-5", stage=1, first=3, last=5)
    table = RunTable(PagePool(layout_of(w8a8, 3, 5), 50))
    metrics = WorkerMetrics(CollectorRegistry())
    return Intake(
        role,
        w8a8.model,
        None,
        Links(client, client, keys, scripts, RedisWatch(metrics.redis_errors), threading.Event()),
        table,
    )


def first_rows(request: str, run: str) -> tuple[ForwardSegment, Forward]:
    segment = ForwardSegment(
        request=request, run=run, sequence=0, position=0, token_ids=(1, 2, 3), ends_known=False, drafts=0
    )
    return segment, Forward(sender="a", segments=(segment,), rows=np.zeros((3, 8), np.float32))


def test_a_log_that_cannot_be_read_ends_its_request_alone(cell: Cell, intake: Intake) -> None:
    cell.accept("req-1")
    cell.accept("req-2")
    broken, good = cell.claim("a")
    cell.commit(broken, 0, [7])
    cell.client.delete(cell.keys.log("req-1"))
    cell.client.xadd(cell.keys.log("req-1"), {"token": "rubbish"}, id="1-0")
    assert intake.segment(*first_rows("req-1", broken.run)) == "drop"
    assert isinstance(intake.segment(*first_rows("req-2", good.run)), Run)
    (_, end), *_ = cast(Any, cell.client.xrevrange(cell.keys.log("req-1"), count=1))
    assert end[b"end"] == b"error" and b'"code": "wire"' in end[b"meta"]
    assert cell.record("req-1")["state"] == "done" and cell.requests_of_worker("b") == {"req-2"}


def test_a_body_that_cannot_be_read_ends_its_request_alone(cell: Cell, intake: Intake) -> None:
    cell.accept("req-1")
    (run,) = cell.claim("a")
    cell.client.hset(cell.keys.request("req-1"), "body", b"\xc1rubbish")
    assert intake.segment(*first_rows("req-1", run.run)) == "drop"
    (end,) = cell.log("req-1")
    assert isinstance(end, EndEntry) and end.meta["code"] == "wire"
