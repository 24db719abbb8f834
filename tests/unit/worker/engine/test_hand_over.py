"""A worker that moves on passes its requests to others a few at a time; on a real Redis."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.transitions import calls
from blockrelay_worker.engine.hand_over import HandOver
from blockrelay_worker.engine.intake import Intake
from blockrelay_worker.engine.run_endings import Endings
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.policy import HAND_OVER_ROWS
from tests.support.cell import Cell
from tests.support.worker.links import links_of
from tests.support.worker.stage_role import stage_role


class Leaving:
    """Worker `a` of the whole model, with a run for each of some prompts, and the worker `b` that follows it."""

    def __init__(self, cell: Cell, folder: BlockFolder, monkeypatch: pytest.MonkeyPatch, *lengths: int) -> None:
        monkeypatch.setattr("blockrelay_worker.engine.hand_over.HAND_OVER_LOOK_S", 0.0)
        self.cell = cell
        links, metrics = links_of(cell), WorkerMetrics(CollectorRegistry())
        cell.worker("a", split="1-5")
        role = stage_role(folder, "a", split="1-5", stage=0, first=1, last=5)
        self.table = RunTable(PagePool(layout_of(folder, 1, 5), 50))
        intake = Intake(role, folder.model, None, links, self.table, metrics)
        for number, length in enumerate(lengths):
            prompt = np.arange(1, length + 1, dtype=np.int32)
            cell.accept(f"req-{number}", need=60, content=RequestBody(prompt=prompt, params={"max_tokens": 20}))
        self.jobs = cell.claim("a")
        for job in self.jobs:
            intake.claimed(job)
        cell.worker("b", split="1-5")
        self.hand_over = HandOver(self.table, links, Endings(role, links, self.table, metrics, lambda: None))

    def left(self) -> list[str]:
        """The requests that are still on `a`, after the next look."""
        self.hand_over.go_on()
        return sorted(run.request_id for run in self.table.all())


def test_the_next_request_leaves_when_those_before_it_have_gone_on(
    cell: Cell, w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = HAND_OVER_ROWS // 2
    leaving = Leaving(cell, w8a8, monkeypatch, half, half, half)
    assert leaving.left() == ["req-2"], "two fit together"
    assert leaving.left() == ["req-2"], "nobody has taken them yet"
    first, second = cell.claim("b")
    assert leaving.left() == ["req-2"], "they are taken, and have no token yet"
    cell.commit(first, 0, [7])
    assert leaving.left() == [], "one has gone on, and leaves room"
    cell.commit(second, 0, [7])
    (third,) = cell.claim("b")
    assert third.request_id == "req-2" and cell.requests_of_worker("a") == set()


def test_a_long_request_goes_alone_and_one_that_has_ended_holds_up_nobody(
    cell: Cell, w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = Leaving(cell, w8a8, monkeypatch, 2 * HAND_OVER_ROWS, 3, 3)
    assert leaving.left() == ["req-1", "req-2"]
    assert leaving.left() == ["req-1", "req-2"]
    cell.scripts.run(calls.finish("req-0", "cancelled"))
    assert leaving.left() == []


def test_tokens_that_the_log_has_are_not_computed_again(
    cell: Cell, w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = Leaving(cell, w8a8, monkeypatch, 3)
    cell.commit(leaving.jobs[0], 0, [7, 8])
    leaving.table.all()[0].learn((7, 8))
    assert leaving.left() == []
    (again,) = cell.claim("b")
    assert again.tokens == (7, 8)
    assert leaving.left() == [] and cell.commit(again, 2, [9]).verdict == "OK"
