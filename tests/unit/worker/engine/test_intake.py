"""A later stage creates a run when its first rows arrive."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.encoding.forward_segment import ForwardSegment
from blockrelay.protocol.messages import Claimed, EndEntry, Forward, RequestBody
from blockrelay.protocol.transitions import calls
from blockrelay_worker.engine.intake import Intake
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.kv.prefix_cache import PrefixCache
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.runs.run import Run
from blockrelay_worker.transport.redis_links import Links
from tests.support.cell import Cell
from tests.support.worker.links import links_of
from tests.support.worker.stage_role import stage_role


@pytest.fixture
def cell(cell: Cell) -> Cell:
    for stage, name in enumerate("ab"):
        cell.worker(name, stage=stage, split="1-2,3-5")
    return cell


@pytest.fixture
def intake(w8a8: BlockFolder, cell: Cell) -> Intake:
    """That of the last stage."""
    return intake_of(w8a8, links_of(cell))[0]


def intake_of(w8a8: BlockFolder, links: Links) -> tuple[Intake, RunTable]:
    """That of the last stage, and its table."""
    role = stage_role(w8a8, "b", split="1-2,3-5", stage=1, first=3, last=5)
    pool, metrics = PagePool(layout_of(w8a8, 3, 5), 50), WorkerMetrics(CollectorRegistry())
    table = RunTable(pool, PrefixCache(pool, model_hash="m", numerics="n", metrics=metrics, stage=role.stage))
    return Intake(role, w8a8.model, None, links, table, metrics), table


def first_rows(
    request_id: str, run_id: str, *, position: int = 0, tokens: Sequence[int] = (1, 2, 3)
) -> tuple[ForwardSegment, Forward]:
    segment = ForwardSegment(
        request_id=request_id,
        run_id=run_id,
        sequence=0,
        position=position,
        token_ids=tuple(tokens),
        ends_known=False,
        drafts=0,
    )
    return segment, Forward(sender="a", segments=(segment,), rows=np.zeros((len(tokens), 8), np.float32))


def test_a_log_that_cannot_be_read_ends_its_request_alone(cell: Cell, intake: Intake) -> None:
    cell.accept("req-1")
    cell.accept("req-2")
    broken, good = cell.claim("a")
    cell.commit(broken, 0, [7])
    cell.client.delete(cell.keys.log("req-1"))
    cell.client.xadd(cell.keys.log("req-1"), {"token": "rubbish"}, id="1-0")
    assert intake.segment(*first_rows("req-1", broken.run_id)) == "drop"
    assert isinstance(intake.segment(*first_rows("req-2", good.run_id)), Run)
    (_, end), *_ = cast(Any, cell.client.xrevrange(cell.keys.log("req-1"), count=1))
    assert end[b"end"] == b"error" and b'"code": "wire"' in end[b"meta"]
    assert cell.record("req-1")["state"] == "done" and cell.requests_of_worker("b") == {"req-2"}


def test_a_body_that_cannot_be_read_ends_its_request_alone(cell: Cell, intake: Intake) -> None:
    run = cell.begin("a")
    cell.client.hset(cell.keys.request("req-1"), "body", b"\xc1rubbish")
    assert intake.segment(*first_rows("req-1", run.run_id)) == "drop"
    (end,) = cell.log("req-1")
    assert isinstance(end, EndEntry) and end.meta["code"] == "wire"


def test_rows_wait_while_a_run_whose_end_is_not_known_here_holds_their_pages(cell: Cell, w8a8: BlockFolder) -> None:
    intake, table = intake_of(w8a8, links_of(cell))
    cell.accept("req-1")
    cell.accept("req-2")
    first, second = cell.claim("a")
    run = intake.segment(*first_rows("req-1", first.run_id))
    assert isinstance(run, Run) and table.grow(run, table.pool.pages * PAGE)
    assert intake.segment(*first_rows("req-2", second.run_id)) == "later"
    table.drop("req-1", first.run_id)
    assert isinstance(intake.segment(*first_rows("req-2", second.run_id)), Run)


def test_rows_of_a_step_come_behind_the_pages_of_the_steps_before_or_say_how_many_there_are(
    cell: Cell, w8a8: BlockFolder
) -> None:
    """The stage before is a device that varies; the first stage of each step has found more, or as much."""
    intake, table = intake_of(w8a8, links_of(cell))
    cell.worker("gpu", stage=0, split="1-2,3-5", device="gpu", varies=True)
    cell.scripts.run(calls.dead("a", silent_s=0))
    tokens = list(range(1, 61))

    def step(number: int, length: int) -> Claimed:
        prompt = np.array(tokens[:length], np.int32)
        cell.accept(f"req-{number}", content=RequestBody(prompt=prompt, params={}, session="s", step=number))
        return claimed()

    def claimed() -> Claimed:
        (job,) = cell.claim("gpu")
        assert job.private and job.route == ("gpu", "b")
        return job

    def arrive(job: Claimed, position: int) -> Run | str:
        length = job.body.prompt.size
        rows = first_rows(job.request_id, job.run_id, position=position, tokens=tokens[position:length])
        run = intake.segment(*rows)
        if isinstance(run, str):
            said = intake.reusable(rows[0])
            cell.rerun(job, "missing_pages", found=said)
            return f"{run}: {said}"
        run.tokens_computed(length)
        table.publish(run)
        return run

    assert isinstance(arrive(step(1, 40), 0), Run)
    second = step(2, 50)
    assert arrive(second, 48) == "rerun: 32", "the pages of the first step"
    again = claimed()
    assert again.reusable == 32 and again.run_id != second.run_id
    run = arrive(again, 32)
    assert isinstance(run, Run) and (run.kv.cached, run.computed) == (32, 50)
    run = arrive(step(3, 60), 48)
    assert isinstance(run, Run) and run.kv.cached == 48
    table.check_integrity()
