"""Rows that become NaN or infinite: a CPU computes what a device spoiled, and an error names the block that did it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import DeviceLost
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.messages import EndEntry, TokenEntry
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import Scripts
from blockrelay_worker.execution.batch import Batch, BlockFault, StageOutput
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fault_injection import WrappingExecutor
from blockrelay_worker.execution.process.care import DeviceCare
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from blockrelay_worker.execution.process.stage import DeviceStage
from tests.support.cell import MODEL, Cell, body
from tests.support.models.altered_blocks import spoiled_for
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.planted_overflow import OVERFLOWING, overflowing_model
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.scraping import sampled
from tests.support.waiting import wait_until
from tests.support.worker.running_engine import end_of, engine_running

BLOCK = 3
BAD, GOOD = [OVERFLOWING, 8, 9], [7, 8, 9]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """Block 3 overflows for one token."""
    return overflowing_model(tmp_path_factory.mktemp("overflowing"), "w8a8", block=BLOCK)


def plain(executor: Executor) -> Executor:
    return executor


def gpus_begin(scripts: Scripts) -> None:
    """Routes begin at GPUs, though there are CPUs."""
    scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))


def ended(cell: Cell, *names: str) -> list[EndEntry]:
    wait_until(lambda: all(end_of(cell, name) for name in names), "all end", timeout_s=20)
    return [end for name in names if (end := end_of(cell, name))]


def assert_named(end: EndEntry, device: str) -> None:
    """As CONTRACTS has it: what ran well before it, the block, its time, where it failed."""
    meta = end.meta
    assert (end.reason, meta["code"], meta["failed_block"], meta["device"]) == (
        "error",
        "row_not_finite",
        f"block_{BLOCK}",
        device,
    )
    assert f"a row became NaN or infinite in block_{BLOCK}" in meta["error"]
    assert list(meta["execution_times"]) == ["block_1", "block_2", "block_3"]
    assert all(seconds > 0 for seconds in meta["execution_times"].values())


def test_a_cpu_names_the_block_and_its_neighbours_do_not_notice(overflowing: BlockFolder, cell: Cell) -> None:
    names = ["req-0", "req-1", "req-bad", "req-2"]
    with engine_running(overflowing, cell, broken=plain) as table:
        for name in names:
            content = body(BAD if name == "req-bad" else GOOD, ignore_eos=True, temperature=0.0)
            cell.accept(name, content=content)
        *_, bad, last = ended(cell, *names)
        wait_until(lambda: len(table) == 0, "nothing is left")
        tokens = [[e.token for e in cell.log(name) if isinstance(e, TokenEntry)] for name in names]
    assert_named(bad, "cpu")
    assert last.reason == "length" and tokens == [tokens[0], tokens[0], [], tokens[0]] and len(tokens[0]) == 8


def test_a_block_that_overflows_in_the_middle_of_a_request_is_named_too(overflowing: BlockFolder, cell: Cell) -> None:
    """In the rows of a later step, behind pages that are sealed."""
    with engine_running(overflowing, cell, broken=plain):
        cell.accept("req-bad", content=body([*range(3, 40), OVERFLOWING], ignore_eos=True), limit=1000, need=8)
        (end,) = ended(cell, "req-bad")
    assert_named(end, "cpu")


def test_what_a_gpu_spoils_goes_to_a_cpu(overflowing: BlockFolder, cell: Cell) -> None:
    gpus_begin(cell.scripts)
    registry = CollectorRegistry()
    with engine_running(overflowing, cell, broken=plain, device="gpu", registry=registry) as table:
        cell.worker("idle CPU", split=f"1-{overflowing.model.blocks}")
        cell.accept("req-good", content=body(GOOD, ignore_eos=True))
        cell.accept("req-bad", content=body(BAD))
        wait_until(lambda: cell.queued("reruns", "cpu") == ["req-bad"], "it waits for a CPU")
        (good,) = ended(cell, "req-good")
        wait_until(lambda: len(table) == 0, "the GPU forgot it")
    assert good.reason == "length" and not good.fallbacks
    told = cell.record("req-bad")["fallbacks"]
    assert '"reason":"gpu_wrong_numbers"' in told and '"error_code":"INTERNAL"' in told
    assert sampled(generate_latest(registry).decode(), "blockrelay_worker_fallbacks_total", reason="gpu_error") == 1


def test_without_a_cpu_it_ends_at_the_gpu_and_says_so(overflowing: BlockFolder, cell: Cell) -> None:
    """It comes back to the GPU, where the same would happen for ever."""
    with engine_running(overflowing, cell, broken=plain, device="gpu"):
        cell.accept("req-bad", content=body(BAD))
        (end,) = ended(cell, "req-bad")
    assert_named(end, "gpu")
    assert end.meta["error"].endswith(", and no CPU is there")
    assert [(event.reason, event.success) for event in end.fallbacks] == [("gpu_wrong_numbers", False)]


def test_a_request_that_denies_cpus_ends_at_once(overflowing: BlockFolder, cell: Cell) -> None:
    gpus_begin(cell.scripts)
    with engine_running(overflowing, cell, broken=plain, device="gpu"):
        cell.worker("idle CPU", split=f"1-{overflowing.model.blocks}")
        cell.accept("req-bad", content=replace(body(BAD), fallback="deny"))
        (end,) = ended(cell, "req-bad")
    assert_named(end, "gpu")
    assert "fallback: deny" in end.meta["error"] and not end.fallbacks


@pytest.mark.onnx_blocks
def test_onnx_blocks_that_others_made_are_named_too(w8a8: BlockFolder, cell: Cell, tmp_path: Path) -> None:
    """By ONNX Runtime on a CPU, in a process of its own: nobody stands in for it."""
    whole = write_reference_blocks(tmp_path / "whole", ReferenceModel(layers=4))
    folder = opened(spoiled_for(whole, tmp_path / "blocks", OVERFLOWING), tmp_path / "cache")
    assert folder.model.blocks == w8a8.model.blocks
    executors = DeviceExecutors(folder, Gpu("cpu", 20))
    try:
        stage = executors.load(folder, 1, folder.model.blocks, pages=100)
        with engine_running(w8a8, cell, broken=lambda _: stage):
            cell.accept("req-bad", content=body([5, OVERFLOWING, 9]))
            cell.accept("req-good", content=body(GOOD, ignore_eos=True))
            bad, good = ended(cell, "req-bad", "req-good")
    finally:
        executors.close()
    assert_named(bad, "cpu")
    assert good.reason == "length"


class LostWhenAsked(WrappingExecutor):
    """Gives NaN, and is not there any more when somebody looks why."""

    def run(self, batch: Batch) -> StageOutput:
        output = super().run(batch)
        assert output.logits is not None
        return StageOutput(logits=output.logits, not_finite=tuple(range(len(batch.segments))))

    def first_not_finite(self, batch: Batch) -> BlockFault | None:
        raise DeviceLost("gone", reason="device_lost", code="INTERNAL")


def test_a_device_that_is_lost_meanwhile_hands_over_what_it_has(overflowing: BlockFolder, cell: Cell) -> None:
    gpus_begin(cell.scripts)
    with engine_running(overflowing, cell, broken=LostWhenAsked, device="gpu") as table:
        cell.worker("idle CPU", split=f"1-{overflowing.model.blocks}")
        cell.accept("req-1", content=replace(body(GOOD), fallback="deny"))
        wait_until(lambda: cell.record().get("denied_block"), "it waits for another GPU")
        wait_until(lambda: not table.all(), "it is here no more")
    assert end_of(cell, "req-1") is None


@contextmanager
def misbehaving(folder: BlockFolder, monkeypatch: pytest.MonkeyPatch, **how: str) -> Iterator[DeviceStage]:
    for name, value in how.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    module = "tests.support.worker.failing_child"
    executors = DeviceExecutors(folder, Gpu("cpu", 5.0), module=module)
    try:
        yield executors.load(folder, 1, folder.model.blocks, pages=100)
    finally:
        executors.close()


@pytest.mark.parametrize(("wrong_from", "canary"), [("100000", "right"), ("9", "wrong")])
def test_a_device_that_gave_nan_answers_its_canary_at_once(
    w8a8: BlockFolder, cell: Cell, monkeypatch: pytest.MonkeyPatch, wrong_from: str, canary: str
) -> None:
    """In a real process, whose eighth step gives NaN; none is due otherwise. If it is wrong the device is lost."""
    registry = CollectorRegistry()
    gpus_begin(cell.scripts)
    with misbehaving(w8a8, monkeypatch, NAN_AT="8", WRONG_FROM=wrong_from) as stage:

        def care(metrics: WorkerMetrics) -> DeviceCare:
            return DeviceCare(stage, metrics.device, canary_every_s=1e6)

        with engine_running(w8a8, cell, broken=lambda _: stage, device="gpu", registry=registry, care=care) as table:
            cell.worker("idle CPU", split=f"1-{w8a8.model.blocks}")
            cell.accept("req-1", content=body(GOOD, ignore_eos=True, max_tokens=50, use_cache=False))
            wait_until(lambda: cell.queued("reruns", "cpu") == ["req-1"], "it waits for a CPU", timeout_s=20)

            def canaries() -> float:
                text = generate_latest(registry).decode()
                return sampled(text, "blockrelay_worker_canaries_total", result=canary)

            wait_until(lambda: canaries() == 1, "the canary has sung")
        assert stage.usable == (canary == "right") and not table.all()
    assert len(cell.log("req-1")) in (6, 7), "what came before stays; the last commit may come behind the re-run"
    assert '"reason":"gpu_wrong_numbers"' in cell.record("req-1")["fallbacks"]
