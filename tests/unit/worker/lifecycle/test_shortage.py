"""A worker without memory for its stage says so and waits, until it gets a smaller folder or memory is there."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.observability.registry import service_registry
from blockrelay.protocol.plan import Plan, WorkerInfo
from blockrelay.protocol.transitions import calls
from blockrelay.redis.registry import read_workers
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.lifecycle.parts import WorkerParts
from blockrelay_worker.lifecycle.service import StageService
from tests.support.cell import Cell
from tests.support.models.tiny_model import write_tiny_model
from tests.support.waiting import wait_until
from tests.support.worker.links import links_of


class Scarce(CpuExecutors):
    """Runs out of memory as often as `failures` says when it loads the folder `scarce`, a key."""

    scarce, failures = "", 0

    def __init__(self) -> None:
        super().__init__(1)
        self.made: list[StageExecutor] = []

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> StageExecutor:
        if folder.model_key == self.scarce and self.failures > 0:
            self.failures -= 1
            raise MemoryError
        self.made.append(super().load(folder, first_block, last_block, pages=pages))
        return self.made[-1]


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    return open_block_folder(write_tiny_model(tmp_path_factory.mktemp("smaller"), "w4a8"), blocks=[])


class Serving:
    """A worker that serves one stage after the other in a thread; the test plays the scheduler."""

    def __init__(self, cell: Cell, folders: tuple[BlockFolder, BlockFolder], free: Path, degrade: str) -> None:
        self.cell, self.stop, self.epoch = cell, threading.Event(), 0
        self.large, self.small = (folder.model_key for folder in folders)
        self.executors = Scarce()
        self.executors.scarce = self.large
        settings = WorkerSettings.model_validate({
            "host": "h", "model": folders[0].root, "kv_bytes": 1 << 20, "degrade": degrade, "inject_memory": free,
            "page_store_bytes": 0, "beat_s": 0.05,
        })  # fmt: skip
        self.parts = WorkerParts(
            settings=settings,
            folders=folders,
            executors=self.executors,
            links=links_of(cell, stop=self.stop),
            registry=service_registry("worker", cell="c", model="m"),
            metrics=WorkerMetrics(CollectorRegistry()),
            device=None,
            port=1,
        )
        self.thread = threading.Thread(target=self._run)
        self.error: Exception | None = None

    def _run(self) -> None:
        service = StageService(self.parts)
        try:
            while not self.stop.is_set():
                service.run()
                service = service.next()
        except Exception as error:  # noqa: BLE001  # the test looks at it
            self.error = error

    @property
    def worker(self) -> WorkerInfo | None:
        found = read_workers(self.cell.client, self.cell.keys, self.large)
        return found[-1] if found else None

    def planned(self, folder: str) -> WorkerInfo:
        """Gives the worker that has registered last the whole model in `folder`."""
        wait_until(lambda: self.worker, "it has registered")
        worker = self.worker
        assert worker is not None
        key = "" if folder == self.large else folder
        plan = Plan(
            epoch=0, split="1-5", route_class="cpu", assignments={worker.id: 0}, blocks={}, reasons=(), folder=key
        )
        call = calls.publish_plan(
            self.large, replaces_epoch=self.epoch, inputs=str(self.epoch), route_class="cpu", plan=plan.to_json()
        )
        self.epoch = self.cell.scripts.run(call)
        return worker

    def is_short_of(self, folder: str) -> bool:
        return (worker := self.worker) is not None and worker.short_of == folder

    def serves(self, folder: str) -> bool:
        return (worker := self.worker) is not None and worker.ready and worker.folder == folder


@pytest.fixture
def degrade() -> str:
    return "on"


@pytest.fixture
def serving(cell: Cell, w8a8: BlockFolder, smaller: BlockFolder, tmp_path: Path, degrade: str) -> Iterator[Serving]:
    one = Serving(cell, (w8a8, smaller), tmp_path / "free", degrade)
    one.thread.start()
    yield one
    one.stop.set()
    one.thread.join(20)
    assert not one.thread.is_alive()
    for executor in one.executors.made:  # a process would end now
        executor.close()


def test_it_says_so_and_loads_the_smaller_folder_that_it_is_given(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "free").write_text("1000")
    serving.planned(serving.large)
    wait_until(lambda: serving.is_short_of(serving.large), "it says that memory lacks")
    worker = serving.worker
    assert worker is not None and (worker.state, worker.stage, worker.free_bytes) == ("short", None, 1000)
    large, small = (worker.folder_with(key) for key in (serving.large, serving.small))
    assert large is not None and small is not None and 1000 < small.bytes < large.bytes
    serving.planned(serving.small)
    wait_until(lambda: serving.serves(serving.small), "without a smaller one it loads what there is")
    worker = serving.worker
    assert worker is not None and not worker.short_of and worker.held_bytes > 0


def test_it_loads_its_stage_when_memory_is_there(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "free").write_text("1000")
    before = serving.planned(serving.large)
    wait_until(lambda: serving.is_short_of(serving.large), "it says that memory lacks")
    (tmp_path / "free").unlink()
    wait_until(lambda: serving.serves(serving.large), "it serves")
    assert serving.worker is not None and (serving.worker.id, serving.worker.short_of) == (before.id, "")


def test_memory_that_runs_out_in_the_load_is_a_shortage_too(serving: Serving) -> None:
    serving.executors.failures = 1
    first = serving.planned(serving.large)
    wait_until(lambda: (one := serving.worker) is not None and one.id != first.id, "it registers again")
    serving.planned(serving.large)
    wait_until(lambda: serving.is_short_of(serving.large), "it says that memory lacks")
    serving.planned(serving.small)
    wait_until(lambda: serving.serves(serving.small), "it serves the smaller folder")
    serving.planned(serving.large)
    wait_until(lambda: (one := serving.worker) is not None and one.succeeds, "the larger one is tried again")


@pytest.mark.parametrize("degrade", ["off"])
def test_without_permission_it_ends_with_one_line(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "free").write_text("1000")
    serving.executors.failures = 1
    serving.planned(serving.large)
    serving.thread.join(20)
    assert str(serving.error) == (
        "not enough memory for block_1 to block_5 in w8a8: give the worker more memory or fewer blocks, or the system "
        "a smaller precision with --other-precision and --degrade"
    )
    assert not read_workers(serving.cell.client, serving.cell.keys, serving.large), "it has left the registry"


def test_its_heartbeats_tell_what_it_holds_and_what_is_free(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockrelay_worker.lifecycle.heartbeat.FREE_MEMORY_S", 0)
    serving.planned(serving.large)
    wait_until(lambda: serving.serves(serving.large), "it serves")
    worker = serving.worker
    assert worker is not None
    serving.cell.client.hset(serving.cell.keys.worker(worker.id), mapping={"free_bytes": 1, "held_bytes": 1})
    wait_until(lambda: (one := serving.worker) is not None and one.free_bytes > 1, "it has told the system's memory")
    assert serving.worker is not None and serving.worker.held_bytes == worker.held_bytes


def test_a_successor_that_finds_no_memory_has_its_worker_make_room_first(serving: Serving) -> None:
    """A worker that tried to load beside its stage again and again would never end the change."""
    before = serving.planned(serving.small)
    wait_until(lambda: serving.serves(serving.small), "it serves the smaller folder")
    serving.executors.failures = 1
    serving.planned(serving.large)
    wait_until(lambda: (one := serving.worker) is not None and one.succeeds == before.id, "it has a successor")
    successor = serving.planned(serving.large)
    gone = {before.id, successor.id}
    wait_until(lambda: (one := serving.worker) is not None and one.id not in gone, "it has left its stage")
    serving.planned(serving.large)
    wait_until(lambda: serving.serves(serving.large), "it serves the larger one, alone", timeout_s=30)
    assert serving.executors.failures == 0 and len(serving.executors.made) == 2
