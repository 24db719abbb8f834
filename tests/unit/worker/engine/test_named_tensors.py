"""Real engines of a split whose stages hand on tensors by name: tokens, errors and bounds are those of rows."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import ExecutionError
from blockrelay.protocol.encoding import named_tensors
from blockrelay.protocol.messages import EndEntry, TokenEntry
from blockrelay.protocol.status_events import decode_events
from blockrelay_worker.engine.rows import forward_builder
from blockrelay_worker.engine.rows.batch_builder import batch_of
from blockrelay_worker.engine.rows.forward_builder import forwards
from blockrelay_worker.execution.batch import NamedTensors
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.scheduling.work import Work
from blockrelay_worker.transport.status_events import StatusEventPublisher
from tests.support.cell import Cell, begin_cell, body
from tests.support.models.planted_overflow import OVERFLOWING, overflowing_model
from tests.support.scraping import sampled
from tests.support.waiting import wait_until
from tests.support.worker.handing_on import HandingOn
from tests.support.worker.running_engine import end_of, engine_running, stages_running
from tests.support.worker.runs import new_run
from tests.support.worker.stage_role import stage_role

SPLIT = "1-2,3-4,5-5"
#: One repeats itself, so that its next tokens can be guessed.
PROMPTS = {"req-long": [*range(20, 60)], "req-short": [7, 8, 9], "req-again": [5, 6] * 8}


def accept(cell: Cell, prompts: dict[str, list[int]]) -> None:
    for name, prompt in prompts.items():
        cell.accept(name, need=8, limit=1000, content=body(prompt, ignore_eos=True, temperature=0.0))


def ends(cell: Cell, names: Sequence[str]) -> list[EndEntry]:
    wait_until(lambda: all(end_of(cell, name) for name in names), "all end", timeout_s=30)
    return [end for name in names if (end := end_of(cell, name))]


def tokens(cell: Cell) -> list[list[int]]:
    assert {end.reason for end in ends(cell, list(PROMPTS))} == {"length"}
    return [[e.token for e in cell.log(name) if isinstance(e, TokenEntry)] for name in PROMPTS]


def kept(executors: list[HandingOn], *, one_by_one: bool = False) -> Callable[[Executor], Executor]:
    """What hands on tensors; into `executors`, in the order of the stages."""

    def handing_on(executor: Executor) -> Executor:
        executors.append(HandingOn(executor, one_by_one=one_by_one))
        return executors[-1]

    return handing_on


@pytest.mark.parametrize("one_by_one", [False, True])
def test_tokens_are_those_of_one_stage_and_none_are_guessed(w8a8: BlockFolder, cell: Cell, one_by_one: bool) -> None:
    with engine_running(w8a8, cell, broken=lambda executor: executor):
        accept(cell, PROMPTS)
        expected = tokens(cell)
    begin_cell(cell.client, cell.keys)
    seen, registries = list[HandingOn](), [CollectorRegistry() for _ in range(3)]
    broken = kept(seen, one_by_one=one_by_one)
    with stages_running(
        w8a8, cell, split=SPLIT, broken=broken, registries=registries, named_tensors=True, max_rows=24
    ) as tables:
        accept(cell, PROMPTS)
        assert tokens(cell) == expected
        wait_until(lambda: not any(len(table) for table in tables), "every stage has forgotten them")
    first, second, last = seen
    assert {s.rows for b in first.seen for s in b.segments if s.first_position >= 40} == {1}, "no guesses"
    parts = [len(own) for batch in second.seen for own in batch.tensors]
    assert (max(parts) > 1) == one_by_one
    assert all(b.tokens is not None and b.tokens.size == sum(s.rows for s in b.segments) for b in last.seen)
    sent = [
        sampled(generate_latest(one).decode(), "blockrelay_worker_forwarded_bytes_total", way="redis")
        for one in registries[:-1]
    ]
    rows = sum(segment.rows for batch in first.seen for segment in batch.segments)
    assert min(sent) > rows * w8a8.model.hidden_size * 4


def test_what_no_message_can_hold_ends_its_request(
    w8a8: BlockFolder, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (named_tensors, forward_builder):
        monkeypatch.setattr(module, "MAX_MESSAGE_WEIGHT", 12_000)  # of 30 rows, without their mask
    with stages_running(w8a8, cell, split=SPLIT, broken=kept([]), named_tensors=True, max_rows=1000):
        accept(cell, {"req-large": [*range(20, 60)]})
        (large,) = ends(cell, ["req-large"])
        accept(cell, {"req-small": [*range(20, 40)]})
        (small,) = ends(cell, ["req-small"])
    assert small.reason == "length"
    assert large.reason == "error" and large.meta["failed_block"] == "block_2"
    assert "block_2 hands on for 40 rows what no message can hold" in large.meta["error"]
    assert large.meta["error"].endswith("lower BLOCKRELAY_MAX_ROWS")


def test_rows_where_tensors_are_expected_end_their_request(w8a8: BlockFolder, cell: Cell) -> None:
    """Its batch cannot be built, so the engine fails it without the executor, and goes on."""
    with stages_running(w8a8, cell, split="1-2,3-5", broken=lambda executor: executor, named_tensors=True):
        for name in ("req-1", "req-2"):
            accept(cell, {name: [7, 8, 9]})
            (end,) = ends(cell, [name])
            assert end.reason == "error" and end.meta["error"].startswith("rows came for ONNX blocks that others made")


def test_what_has_no_room_in_a_message_comes_in_others(w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(rows: int) -> NamedTensors:
        return NamedTensors(rows=rows, arrays={"x": np.zeros((1, rows, 100), np.float32)})

    role = stage_role(w8a8, "w0", split=SPLIT, stage=0, first=1, last=2, named_tensors=True)
    monkeypatch.setattr(forward_builder, "MAX_MESSAGE_WEIGHT", named_tensors.weight([part(5), part(5)]))
    sizes = {"q1": 5, "q2": 5, "q3": 1, "q4": 10, "q5": 2}
    runs = {name: new_run(name, [7] * rows, route=("w0", "w1", "w2")) for name, rows in sizes.items()}
    work = [Work(run=run, position=0, tokens=run.tokens, samples=True) for run in runs.values()]
    sent = forwards([(item, [part(item.rows)]) for item in work], {}, role)
    assert [[segment.request_id for segment in message.segments] for _, message, _ in sent] == [
        ["q1", "q2"], ["q3"], ["q4"], ["q5"],
    ]  # fmt: skip
    for target, message, carried in sent:
        assert target == "w1" and [item.run.request_id for item in carried] == [s.request_id for s in message.segments]
        assert [own[0].rows for own in message.tensors] == [len(s.token_ids) for s in message.segments]


def test_followers_hear_how_many_values_came_out(w8a8: BlockFolder, cell: Cell) -> None:
    with cell.client.pubsub() as followed:
        followed.subscribe(cell.keys.status_channel)
        with stages_running(w8a8, cell, split=SPLIT, broken=kept([]), named_tensors=True):
            threads = [thread for thread in threading.enumerate() if isinstance(thread, StatusEventPublisher)]
            wait_until(
                lambda: all(thread.has_subscribers for thread in threads), "every worker knows that it is followed"
            )
            accept(cell, {"req-1": [7, 8, 9]})
            ends(cell, ["req-1"])
        told = list[dict[str, Any]]()

        def heard() -> bool:
            while message := followed.get_message():
                events = decode_events(cast(bytes, message["data"])) if message["type"] == "message" else []
                told.extend(e for e in events if e["status"].startswith("end") and e["node_id"] in ("w0", "w1"))
            return len(told) == 2 * 8

        wait_until(heard, "both stages have told all their steps")
    for event in told:
        rows, position = event["inference_state"]["rows"], event["inference_state"]["position"]
        assert event["result_size"] == rows * w8a8.model.hidden_size + rows * (position + rows)


def test_a_block_of_a_later_stage_that_overflows_is_named(cell: Cell, tmp_path: Path) -> None:
    folder = overflowing_model(tmp_path, "w8a8", block=4)
    with stages_running(folder, cell, split=SPLIT, broken=kept([]), named_tensors=True):
        accept(cell, {"req-bad": [*range(3, 20), OVERFLOWING], "req-good": [7, 8, 9]})
        bad, good = ends(cell, ["req-bad", "req-good"])
    assert (bad.reason, bad.meta["code"], bad.meta["failed_block"]) == ("error", "row_not_finite", "block_4")
    assert list(bad.meta["execution_times"]) == ["block_1", "block_2", "block_3", "block_4"]
    assert good.reason == "length"


def test_a_later_stage_refuses_what_is_not_for_its_blocks(w8a8: BlockFolder) -> None:
    rows = np.zeros((1, w8a8.model.hidden_size), np.float32)
    part = NamedTensors(rows=1, arrays={"hidden": rows[np.newaxis]})
    for named in (False, True):
        role = stage_role(w8a8, "w1", split=SPLIT, stage=1, first=3, last=4, named_tensors=named)
        work = Work(run=new_run("q", [7]), position=0, tokens=[7], samples=True)
        right, wrong = (
            replace(work, hidden=None if tensors else rows, tensors=[part] if tensors else ())
            for tensors in (named, not named)
        )
        assert (batch_of([right], role).tokens is not None) == named
        with pytest.raises(ExecutionError, match="for ONNX blocks that others made, or tensors for a stage of a block"):
            batch_of([right, wrong], role)


def test_guesses_are_made_in_one_stage_alone(w8a8: BlockFolder) -> None:
    for split, named, guesses in (("1-5", True, True), (SPLIT, False, True), (SPLIT, True, False)):
        role = stage_role(w8a8, "w0", split=split, stage=0, first=1, last=2, named_tensors=named)
        assert role.limits.drafts == guesses
