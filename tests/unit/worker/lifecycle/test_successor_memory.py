"""A worker loads another stage beside its own where there is room for what it has not loaded yet."""

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.observability.registry import service_registry
from blockrelay.protocol.block_times import BESIDE_SHARE
from blockrelay.protocol.plan import Stage
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.lifecycle import parts
from blockrelay_worker.lifecycle.parts import WorkerParts
from tests.support.cell import Cell
from tests.support.worker.links import links_of

PAGES = 8


@pytest.fixture
def place(cell: Cell, w8a8: BlockFolder) -> Iterator[WorkerParts]:
    page_bytes = layout_of(w8a8, 1, 5).bytes_per_page
    yield WorkerParts(
        settings=WorkerSettings(host="h", model=w8a8.root, kv_bytes=PAGES * page_bytes),
        folders=(w8a8,),
        executors=CpuExecutors(1),
        links=links_of(cell),
        registry=service_registry("worker", cell="c", model="m"),
        metrics=WorkerMetrics(CollectorRegistry()),
        device=None,
        port=1,
    )


def test_blocks_that_are_loaded_need_no_memory(
    place: WorkerParts, w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = place.executors.load(w8a8, 1, 3, pages=2)
    kv = PAGES * layout_of(w8a8, 1, 5).bytes_per_page
    beside = sum(w8a8.manifest.block_file(index).bytes for index in (4, 5))

    def fits(available: float) -> bool:
        monkeypatch.setattr(parts, "available_bytes", lambda: available)
        return place.fits_beside(w8a8, Stage(first=1, last=5), processes=1)

    enough = (kv + beside) / BESIDE_SHARE
    assert fits(enough + 2) and not fits(enough - 2)
    present.close()
    assert not fits(enough + 2), "its own blocks are not loaded any more"
    everything = sum(w8a8.manifest.block_file(index).bytes for index in range(1, 6))
    assert fits((kv + everything) / BESIDE_SHARE + 2)
