"""The engine loop on a real Redis with a real stage: what fails, fails alone."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import ExecutionError
from blockrelay.protocol.encoding.stage_span import StageSpan
from blockrelay.protocol.messages import EndEntry, TokenEntry
from blockrelay.protocol.transitions import calls
from blockrelay_worker.engine import step
from blockrelay_worker.execution.batch import Batch, StageOutput
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fault_injection import WrappingExecutor
from blockrelay_worker.states import ENGINE
from tests.support.cell import MODEL, Cell, body
from tests.support.waiting import wait_until
from tests.support.worker.running_engine import end_of, engine_running

MARK = 499  # a prompt that begins with this token is the one that the broken executors stumble over


class Stumbling(WrappingExecutor):
    """Fails a whole batch that holds the mark, as a block does that cannot cope with some input."""

    def run(self, batch: Batch) -> StageOutput:
        if batch.tokens is not None and MARK in batch.tokens:
            seconds = {"block_1": 0.5, "block_2": 0.25, "block_3": 0.125}
            raise ExecutionError("block_3: out of memory", block="block_3", seconds=seconds)
        return self._executor.run(batch)


class Overflowing(Stumbling):
    """The marked segment's rows are not finite."""

    def run(self, batch: Batch) -> StageOutput:
        output = self._executor.run(batch)
        ends = np.cumsum([s.rows for s in batch.segments])
        assert batch.tokens is not None
        marked = {int(np.searchsorted(ends, i, side="right")) for i in np.flatnonzero(batch.tokens == MARK)}
        return replace(output, not_finite=tuple(sorted(marked)))


def ask(cell: Cell) -> tuple[EndEntry, list[EndEntry]]:
    """One marked request among three good ones, together; how each ended."""
    names = ["req-good-0", "req-bad", "req-good-1", "req-good-2"]
    for i, name in enumerate(names):
        prompt = [MARK if name == "req-bad" else 7 + i, 8, 9]
        cell.accept(name, content=body(prompt, ignore_eos=True, temperature=0.0))
    wait_until(lambda: all(end_of(cell, name) for name in names), "all end", timeout_s=20)
    ends = {name: end_of(cell, name) or pytest.fail("no end") for name in names}
    bad = ends.pop("req-bad")
    for name in ends:
        assert sum(isinstance(e, TokenEntry) for e in cell.log(name)) == 8
    return bad, list(ends.values())


def changes(registry: CollectorRegistry, machine: str) -> dict[str, float]:
    """How often each event happened to a state machine."""
    found: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples if family.name == "blockrelay_state_transitions" else ():
            if sample.labels["machine"] == machine:
                found[sample.labels["event"]] = found.get(sample.labels["event"], 0) + sample.value
    return found


def test_a_worker_of_the_whole_model_tells_its_steps_for_traced_requests_alone(w8a8: BlockFolder, cell: Cell) -> None:
    params = {"ignore_eos": True, "temperature": 0.0, "use_cache": False}  # without guesses
    with engine_running(w8a8, cell, broken=lambda executor: executor):
        cell.accept("req-plain", content=body([7, 8, 9], **params))
        cell.accept("req-asked", content=replace(body([7, 8, 9], **params), traced=True))
        wait_until(lambda: end_of(cell, "req-plain") and end_of(cell, "req-asked"), "both end", timeout_s=20)
    assert not cell.client.exists(cell.keys.trace("req-plain"))
    entries: Any = cell.client.xrange(cell.keys.trace("req-asked"))
    steps = [StageSpan.decode(fields) for _, fields in entries]
    assert [step.number for step in steps] == list(range(8)), "one for each token"
    assert [step.rows for step in steps] == list(range(3, 11)) and {step.run for step in steps} == {1}
    assert all(before.ended_us <= after.ready_us for before, after in pairwise(steps)), "sampled in between"


def test_a_request_that_breaks_a_block_fails_alone_and_says_where(w8a8: BlockFolder, cell: Cell) -> None:
    registry = CollectorRegistry()
    with engine_running(w8a8, cell, broken=Stumbling, registry=registry):
        bad, good = ask(cell)
    engine = changes(registry, "engine")
    assert engine["internal"] == engine["rollback_done"] >= 1
    assert engine["batch_ready"] == engine["dispatch_ok"] == engine["worker_done"] + engine["internal"]
    assert bad.reason == "error" and bad.meta["failed_block"] == "block_3" and "out of memory" in bad.meta["error"]
    assert bad.meta["execution_times"] == {"block_1": 0.5, "block_2": 0.25, "block_3": 0.125}
    assert {end.reason for end in good} == {"length"}


def test_a_row_that_is_not_finite_fails_its_request_and_not_its_batch(w8a8: BlockFolder, cell: Cell) -> None:
    with engine_running(w8a8, cell, broken=Overflowing):
        bad, good = ask(cell)
    assert bad.reason == "error" and bad.meta["code"] == "row_not_finite"
    assert bad.meta["failed_block"] == "" and "not again when these ran one by one" in bad.meta["error"]
    assert {end.reason for end in good} == {"length"}


class Counting(WrappingExecutor):
    """Notes the first position and the number of rows of each segment."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.seen: list[tuple[int, int]] = []

    def run(self, batch: Batch) -> StageOutput:
        self.seen += [(segment.first_position, segment.rows) for segment in batch.segments]
        return super().run(batch)


def test_the_state_alone_decides_what_is_done_next(
    w8a8: BlockFolder, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a table that leads from Scheduling back to Idle, batches are built and none is given to the executor."""
    astray = replace(ENGINE, transitions={**ENGINE.transitions, ("Scheduling", "dispatch_ok"): "Idle"})
    monkeypatch.setattr(step, "ENGINE", astray)
    registry = CollectorRegistry()
    with engine_running(w8a8, cell, broken=Stumbling, registry=registry):
        cell.accept("req-bad", content=body([MARK, 8, 9]))
        wait_until(lambda: changes(registry, "engine")["dispatch_ok"] > 2, "batches are built", timeout_s=20)
    assert {event for event, count in changes(registry, "engine").items() if count} == {"batch_ready", "dispatch_ok"}


@pytest.mark.parametrize("use_cache", [True, False])
def test_without_a_cache_each_step_computes_all_rows_and_the_tokens_are_the_same(
    w8a8: BlockFolder, cell: Cell, use_cache: bool
) -> None:
    made: list[Counting] = []

    def counting(executor: Executor) -> Executor:
        made.append(Counting(executor))
        return made[-1]

    with engine_running(w8a8, cell, broken=counting):
        for name, keeps in (("req-1", use_cache), ("req-2", True)):
            content = body([7, 8, 9], ignore_eos=True, temperature=1.0, seed=3, use_cache=keeps)
            cell.accept(name, content=content)
            wait_until(lambda of=name: end_of(cell, of), "it ends", timeout_s=20)
        first, second = ([e.token for e in cell.log(name) if isinstance(e, TokenEntry)] for name in ("req-1", "req-2"))
    assert first == second and len(first) == 8
    anew = [(0, 3 + n) for n in range(8)]
    assert (made[0].seen[:8] == anew) == (not use_cache)
    assert made[0].seen[-1][0] > 0, "the other one kept its KV"


def test_a_failing_gpu_gives_its_whole_batch_to_the_cpu_stream(w8a8: BlockFolder, cell: Cell) -> None:
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
    with engine_running(w8a8, cell, broken=Stumbling, device="gpu") as table:
        cell.worker("idle CPU", split=f"1-{w8a8.model.blocks}")
        cell.accept("req-bad", content=body([MARK, 8, 9]))
        wait_until(lambda: cell.queued("reruns", "cpu") == ["req-bad"], "it waits for a CPU")
        wait_until(lambda: len(table) == 0, "the GPU forgot it")
    assert '"block_id":"block_3"' in cell.record("req-bad")["fallbacks"]


def test_a_message_that_cannot_be_read_is_refused_and_nothing_stops(w8a8: BlockFolder, cell: Cell) -> None:
    with engine_running(w8a8, cell, broken=lambda e: e):
        cell.client.xadd(cell.keys.inbox("w"), {"next_job": b"\xc1rubbish"})
        cell.client.xadd(cell.keys.inbox("w"), {"head": b"\x81", "rows": b""})
        cell.accept("req-1", content=body([7, 8, 9], ignore_eos=True))
        wait_until(lambda: end_of(cell, "req-1"), "it ends")


def test_a_body_that_cannot_be_read_ends_its_request_alone(w8a8: BlockFolder, cell: Cell) -> None:
    for request in ("req-1", "req-2", "req-3"):
        cell.accept(request, content=body([7, 8, 9], ignore_eos=True))
    cell.client.hset(cell.keys.request("req-2"), "body", b"\xc1rubbish")
    with engine_running(w8a8, cell, broken=lambda e: e) as table:
        wait_until(lambda: all(end_of(cell, f"req-{i}") for i in (1, 2, 3)), "all end")
        ends = [end_of(cell, f"req-{i}") for i in (1, 2, 3)]
        wait_until(lambda: len(table) == 0, "nothing is left")
    assert [end.reason for end in ends if end] == ["length", "error", "length"]
    assert ends[1] and ends[1].meta["code"] == "wire"


def test_prompt_rows_and_sampled_tokens_are_counted_apart(w8a8: BlockFolder, cell: Cell) -> None:
    registry = CollectorRegistry()
    with engine_running(w8a8, cell, broken=lambda e: e, registry=registry):
        cell.accept("req-1", content=body([7, 8, 9], ignore_eos=True))
        wait_until(lambda: end_of(cell, "req-1"), "it ends")
    assert registry.get_sample_value("blockrelay_worker_prompt_tokens_total") == 3
    assert registry.get_sample_value("blockrelay_worker_generation_tokens_total") == 8


def test_the_answer_says_how_long_each_block_took(w8a8: BlockFolder, cell: Cell) -> None:
    with engine_running(w8a8, cell, broken=lambda e: e):
        cell.accept("req-1", content=body([7, 8, 9], ignore_eos=True))
        wait_until(lambda: end_of(cell, "req-1"), "it ends")
        end = end_of(cell, "req-1")
    assert end is not None
    times = end.meta["execution_times"]
    assert list(times) == [f"block_{i}" for i in range(1, 6)] and all(seconds > 0 for seconds in times.values())


class Late(Stumbling):
    """Its first step takes until a deadline has passed."""

    until, steps = 0.0, 0

    def run(self, batch: Batch) -> StageOutput:
        self.steps += 1
        wait_until(lambda: time.time() > self.until, "the deadline has passed")
        return self._executor.run(batch)


def kept_in(late: list[Late]) -> Callable[[Executor], Executor]:
    """Makes an executor late, and puts it into the list."""

    def slow(executor: Executor) -> Executor:
        late.append(Late(executor))
        return late[-1]

    return slow


def test_no_step_is_computed_for_a_request_behind_its_deadline(w8a8: BlockFolder, cell: Cell) -> None:
    late: list[Late] = []
    with engine_running(w8a8, cell, broken=kept_in(late)) as table:
        late[0].until = time.time() + 1.0
        cell.accept(content=body([7] * 250, temperature=0.0), deadline_ms=int(1000 * (late[0].until - 0.1)))
        wait_until(lambda: end_of(cell, "req-1") is not None, "it ends")
        wait_until(lambda: len(table) == 0, "it is forgotten")
    end = end_of(cell, "req-1")
    assert end is not None and end.reason == "expired" and end.position == 1
    assert late[0].steps == 1, "its prompt takes four steps"


def test_redis_decides_whether_a_deadline_has_passed(w8a8: BlockFolder, cell: Cell) -> None:
    late: list[Late] = []
    with engine_running(w8a8, cell, broken=kept_in(late)):
        late[0].until = time.time() + 0.5
        cell.accept(content=body([7] * 250, temperature=0.0), deadline_ms=int(1000 * (late[0].until - 0.1)))
        wait_until(lambda: cell.record()["state"] == "running", "it is claimed")
        cell.client.hset(
            cell.keys.request("req-1"), "deadline_ms", int(1000 * (time.time() + 600))
        )  # as if its clock went back
        wait_until(lambda: end_of(cell, "req-1") is not None, "it ends")
    end = end_of(cell, "req-1")
    assert end is not None and end.reason == "length"
