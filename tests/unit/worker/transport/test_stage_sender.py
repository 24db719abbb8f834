"""Early tokens from the last stage to the first, ahead of COMMIT: a hint that may be lost or come twice."""

import numpy as np
import pytest
import redis
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Commit, Forward, NextJob
from blockrelay_worker.engine.intake import Intake
from blockrelay_worker.transport.inbox_reader import decode_entry
from blockrelay_worker.transport.redis_links import Links
from blockrelay_worker.transport.stage_sender import StageSender
from tests.support.cell import Cell
from tests.support.worker.first_stage import Stage
from tests.support.worker.links import links_of

COMMIT = Commit(request_id="p", run_id="p", position=0, tokens=(8, 9))


@pytest.fixture
def links(cell: Cell) -> Links:
    payload = redis.Redis(connection_pool=cell.client.connection_pool)
    return links_of(cell, payload=payload)


def test_tokens_reach_the_first_worker_and_count_once(w8a8: BlockFolder, cell: Cell, links: Links) -> None:
    stage = Stage(w8a8, cell, last=2)
    run = stage.run("p", [1, 2, 3], computed=3)
    sender = StageSender(links, WorkerMetrics(CollectorRegistry()))
    sender.announce([("a", COMMIT)])
    entries = [fields for _, fields in cell.client.xrange(cell.keys.inbox("a")) if b"next_job" in fields]  # pyright: ignore
    event = NextJob(request_id="p", run_id="p", position=0, tokens=(8, 9))
    assert [decode_entry(fields) for fields in entries] == [event]  # pyright: ignore
    metrics = WorkerMetrics(registry := CollectorRegistry())
    intake = Intake(stage.role, w8a8.model, None, links, stage.table, metrics)
    assert intake.next_job(event) and intake.next_job(event), "the hint and then COMMIT's own message"
    assert registry.get_sample_value("blockrelay_worker_request_prefill_time_seconds_count") == 1, "its first token"
    assert run.tokens == [1, 2, 3, 8, 9] and run.computed == 3


def test_a_worker_that_is_gone_gets_no_inbox(w8a8: BlockFolder, cell: Cell, links: Links) -> None:
    Stage(w8a8, cell, last=2)
    cell.client.delete(cell.keys.inbox("a"))
    StageSender(links, WorkerMetrics(CollectorRegistry())).announce([("a", COMMIT)])
    assert not cell.client.exists(cell.keys.inbox("a"))


def test_rows_for_a_worker_that_is_not_there_are_refused_by_its_name(
    client: redis.Redis, keys: Keys, links: Links
) -> None:
    segment = ForwardSegment(request_id="p", run_id="p", sequence=0, position=0, token_ids=(7,), ends_known=True)
    message = Forward(sender="a", segments=(segment,), rows=np.zeros((1, 8), np.float32))
    sender = StageSender(links, WorkerMetrics(CollectorRegistry()))
    with capture_logs() as said:
        assert not sender.forward("nobody", message)
        client.xadd(keys.inbox("b"), {"x": "y"})
        assert sender.forward("b", message), "there is one"
    assert [(entry["event"], entry["worker"], entry["requests"]) for entry in said] == [
        ("FORWARD_UNDELIVERED", "nobody", ["p"])
    ]
    assert not client.exists(keys.inbox("nobody"))
