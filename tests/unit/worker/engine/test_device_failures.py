"""The engine of a device that refuses a batch, has no room, or is lost: what becomes of its requests."""

import os
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import DeviceFailed, DeviceLost, ExecutionError
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.transitions import calls
from blockrelay_worker.engine.step import after_failure
from blockrelay_worker.execution.batch import Batch, StageOutput
from blockrelay_worker.execution.fault_injection import WrappingExecutor
from blockrelay_worker.execution.process.care import DeviceCare
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from blockrelay_worker.scheduling.work import Work
from tests.support.cell import MODEL, Cell, body
from tests.support.scraping import sampled
from tests.support.waiting import wait_until
from tests.support.worker.running_engine import end_of, engine_running, stages_running
from tests.support.worker.runs import new_run

ROOM = DeviceFailed("no room", reason="out_of_memory", code="OOM", capacity=True)
REFUSED = DeviceFailed("not like this", reason="refused", code="INTERNAL", capacity=False)
LOST = DeviceLost("gone", reason="device_lost", code="INTERNAL")
OTHER = ExecutionError("what was that")


def work(count: int) -> list[Work]:
    return [Work(run=new_run(str(number), [1]), position=0, tokens=(1,), samples=True) for number in range(count)]


def ids(work: list[Work]) -> str:
    return "".join(item.run.request_id for item in work)


@pytest.mark.parametrize(
    ("error", "gpu", "given_up", "again"),
    [
        (ROOM, True, "", ["012", "34"]),
        (REFUSED, True, "", ["0", "1", "2", "3", "4"]),
        (LOST, True, "01234", []),
        (OTHER, True, "01234", []),
        (OTHER, False, "", ["0", "1", "2", "3", "4"]),
    ],
)
def test_a_batch_that_failed(error: ExecutionError, gpu: bool, given_up: str, again: list[str]) -> None:
    gone, parts = after_failure(work(5), error, gpu=gpu)
    assert ids(gone) == given_up and [ids(part) for part in parts] == again


@pytest.mark.parametrize("error", [ROOM, REFUSED, LOST, OTHER])
@pytest.mark.parametrize("gpu", [True, False])
def test_a_request_that_fails_alone_is_given_up(error: ExecutionError, gpu: bool) -> None:
    gone, parts = after_failure(work(1), error, gpu=gpu)
    assert len(gone) == 1 and not parts


class Narrow(WrappingExecutor):
    """Has room for two requests at once."""

    most = 0

    def run(self, batch: Batch) -> StageOutput:
        if len(batch.segments) > 2:
            raise ROOM
        Narrow.most = max(Narrow.most, len(batch.segments))
        return super().run(batch)


def test_a_device_without_room_for_all_serves_them_in_halves(w8a8: BlockFolder, cell: Cell) -> None:
    names = [f"req-{number}" for number in range(6)]
    with engine_running(w8a8, cell, broken=Narrow, device="gpu"):
        _accept(cell, names)
        wait_until(lambda: all(end_of(cell, name) for name in names), "all end", timeout_s=20)
    for name in names:
        end = end_of(cell, name)
        assert end is not None and end.reason == "length" and end.fallbacks == (), "nobody was handed over"
    assert Narrow.most == 2


class Lost(WrappingExecutor):
    """Is lost in its third step."""

    steps = 0

    def run(self, batch: Batch) -> StageOutput:
        Lost.steps += 1
        if Lost.steps > 2:
            raise LOST
        return super().run(batch)


def test_a_device_that_is_lost_hands_over_all_that_was_there(w8a8: BlockFolder, cell: Cell) -> None:
    """The engine ends behind that, and the requests wait for somebody else: there is no other worker here."""
    Lost.steps, registry, names = 0, CollectorRegistry(), [f"req-{number}" for number in range(4)]
    with engine_running(w8a8, cell, broken=Lost, device="gpu", registry=registry) as table:
        _accept(cell, names)
        wait_until(lambda: Lost.steps == 3 and not table.all(), "it has given them away", timeout_s=20)
    assert Lost.steps == 3, "what is lost is not asked again"
    text = generate_latest(registry).decode()
    assert sampled(text, "blockrelay_worker_fallbacks_total", block="block_1", reason="gpu_error") >= 1


def test_a_device_that_is_lost_hands_over_what_was_on_its_way_there(w8a8: BlockFolder, cell: Cell) -> None:
    """A request whose route has it, of which it has seen no row yet. From then on no route has it."""
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))

    class Claiming(WrappingExecutor):
        def run(self, batch: Batch) -> StageOutput:
            cell.accept("req-unseen")
            assert len(cell.claim("w")) == 1
            raise LOST

    with engine_running(w8a8, cell, broken=Claiming, device="gpu") as table:
        _accept(cell, ["req-seen"])
        wait_until(lambda: len(cell.queued("reruns", "cpu")) == 2, "both wait for a CPU", timeout_s=20)
    assert not table.all() and cell.client.hget(cell.keys.worker("w"), "draining")
    for request in ("req-seen", "req-unseen"):
        said = cell.record(request)["fallbacks"]
        assert '"reason":"gpu_device_lost"' in said and '"error_code":"INTERNAL"' in said


class Deadly(WrappingExecutor):
    """Is lost in its first step, every time that it is loaded."""

    steps = 0

    def run(self, batch: Batch) -> StageOutput:
        Deadly.steps += 1
        raise LOST


def test_a_request_that_ends_the_process_of_a_cpu_again_and_again_is_a_dead_letter(
    w8a8: BlockFolder, cell: Cell
) -> None:
    """The worker outlives each of them, and says who was computed alone: three deaths among others, five alone."""
    Deadly.steps = 0
    while end_of(cell, "req-1") is None:
        waiting: list[bytes] = cell.client.zrange(cell.keys.delayed, 0, -1)  # pyright: ignore
        if waiting:
            cell.client.zadd(cell.keys.delayed, dict.fromkeys(waiting, 1))
        before = Deadly.steps
        with engine_running(w8a8, cell, broken=Deadly) as table:
            if not before:
                cell.accept("req-1", content=body([7, 8, 9]))
            wait_until(lambda before=before: Deadly.steps > before, "it is tried", timeout_s=20)
        assert not table.all()
    end = end_of(cell, "req-1")
    assert end is not None and (end.reason, end.meta["code"], Deadly.steps) == ("error", "poison", 8)
    assert not end.fallbacks, "no GPU had a part"


class Stepping(WrappingExecutor):
    """Counts its steps."""

    steps = 0

    def run(self, batch: Batch) -> StageOutput:
        Stepping.steps += 1
        return super().run(batch)


def test_a_canary_that_is_wrong_hands_over_what_runs_beside_it(
    w8a8: BlockFolder, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a real process of a device, which has computed twenty steps of a request when the canary comes."""
    monkeypatch.setenv("WRONG_FROM", "21")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    module = "tests.support.worker.failing_child"
    executors = DeviceExecutors(w8a8, Gpu("cpu", 5.0), module=module)
    stage, Stepping.steps = executors.load(w8a8, 1, w8a8.model.blocks, pages=100), 0

    def care(metrics: WorkerMetrics) -> DeviceCare:
        return DeviceCare(stage, metrics.device, canary_every_s=20, clock=lambda: float(Stepping.steps))

    registry = CollectorRegistry()
    cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
    with engine_running(
        w8a8, cell, broken=lambda _: Stepping(stage), device="gpu", registry=registry, care=care
    ) as table:
        cell.worker("idle CPU", split=f"1-{w8a8.model.blocks}")
        cell.accept("req-1", content=body([7, 8, 9], ignore_eos=True, max_tokens=200, use_cache=False))
        wait_until(lambda: cell.queued("reruns", "cpu") == ["req-1"], "it waits for a CPU", timeout_s=20)
    executors.close()
    assert Stepping.steps == 20 and not table.all()
    text = generate_latest(registry).decode()
    assert sampled(text, "blockrelay_worker_canaries_total", result="wrong") == 1
    assert sampled(text, "blockrelay_worker_device_losses_total", reason="canary") == 1
    assert sampled(text, "blockrelay_worker_fallbacks_total", block="block_1", reason="gpu_error") == 1


def _accept(cell: Cell, names: list[str]) -> None:
    for number, name in enumerate(names):
        cell.accept(name, content=body([7 + number, 8, 9], ignore_eos=True, temperature=0.0))


class Crowded(WrappingExecutor):
    """Never has room."""

    tries = 0

    def run(self, batch: Batch) -> StageOutput:
        Crowded.tries += 1
        raise ROOM


def test_a_device_that_runs_out_of_memory_in_two_steps_has_its_worker_leave(w8a8: BlockFolder, cell: Cell) -> None:
    """The cell changes to a smaller precision then. The batches of one step count once."""
    Crowded.tries, split = 0, f"1-{w8a8.model.blocks}"
    with stages_running(w8a8, cell, split=split, broken=Crowded, device="gpu", leaves_without_memory=True) as (table,):
        _accept(cell, ["req-1"])  # handed over to the CPU's queue, from which it takes it again
        wait_until(lambda: Crowded.tries == 2 and not table.all(), "it has given it away", timeout_s=20)
        cell.accept("req-2")
    assert Crowded.tries == 2 and end_of(cell, "req-1") is None, "it takes nothing more"


def test_a_cpu_that_runs_out_of_memory_ends_no_request(w8a8: BlockFolder, cell: Cell) -> None:
    Crowded.tries, split = 0, f"1-{w8a8.model.blocks}"
    with stages_running(w8a8, cell, split=split, broken=Crowded, leaves_without_memory=True) as (table,):
        _accept(cell, ["req-1"])
        wait_until(lambda: Crowded.tries == 1 and not table.all(), "it has given it away", timeout_s=20)
    assert end_of(cell, "req-1") is None
