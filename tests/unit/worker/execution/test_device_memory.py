"""The memory that a stage takes on a device, and the KV pages that fit beside it."""

from dataclasses import replace

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import UsageError
from blockrelay.protocol.plan import Stage
from blockrelay_worker.execution.device_memory import (
    DeviceMemory,
    Neighbours,
    default_budget,
    pages_of_host,
    pages_within,
)
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.cuda import CudaProvider
from blockrelay_worker.execution.onnx.providers.nvidia_driver import NvidiaGpu
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.weights.arrays import block_weights, forms_of
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu

MEMORY = DeviceMemory(
    device="cuda:0",
    block_bytes=[100, 40, 40, 60],
    block_layers=[1, 1, 1, 0],
    table_bytes=7,
    layer_page_bytes=5,
    least_pages=8,
    canary_pages=8,
    budget_bytes=None,
)
FIRST, SECOND, THIRD, HEAD = (
    Stage(first=1, last=2),
    Stage(first=3, last=3),
    Stage(first=3, last=4),
    Stage(first=4, last=4),
)


def pages(budget: int, stage: Stage = FIRST, *, useful: int = 1000, neighbours: Neighbours = Neighbours()) -> int:  # noqa: B008
    return pages_within(MEMORY, stage, budget_bytes=budget, useful=useful, neighbours=neighbours)


def test_pages_get_what_weights_and_canaries_leave() -> None:
    """Two layers of five bytes a page, and eight pages for canaries."""
    assert MEMORY.page_bytes(FIRST) == 10 and MEMORY.pool_bytes(FIRST, 12) == 200
    assert pages(147 + 80 + 80) == 8
    assert pages(147 + 80 + 129) == 12
    assert pages(107 + 40 + 129, Stage(first=1, last=1)) == 25
    assert pages(10**6) == 1000
    assert pages(10**6, useful=3) == 8, "with fewer it is no stage"


def test_the_head_alone_has_neither_tables_nor_pages() -> None:
    assert MEMORY.weight_bytes(HEAD) == 60 and MEMORY.weight_bytes(THIRD) == 107
    assert pages(60, HEAD) == 1000
    with pytest.raises(UsageError, match="block_4 to block_4 need 60 bytes for weights and 0 for 0 KV pages"):
        pages(59, HEAD)


def test_a_stage_that_does_not_fit_says_by_how_much() -> None:
    said = (
        "block_1 to block_2 need 147 bytes for weights and 160 for 16 KV pages on cuda:0, where they may use 306: raise"
    )
    with pytest.raises(UsageError, match=said):
        pages(306)


def test_stages_share_what_all_weights_leave_by_the_bytes_of_their_pages() -> None:
    """In whichever order they are loaded: a request takes as many pages in each of them."""
    budget = MEMORY.weight_bytes(FIRST, THIRD) + 20 * (10 + 5)
    expected = [pages(budget, FIRST, neighbours=Neighbours(expected=(THIRD,)))]
    expected += [pages(budget, THIRD, neighbours=Neighbours(expected=(FIRST,)))]
    assert expected == [12, 12]
    for one, other in ((FIRST, THIRD), (THIRD, FIRST)):
        there = Neighbours(loaded=((one, MEMORY.pool_bytes(one, 12)),))
        assert pages(budget, other, neighbours=there) == 12


def test_what_stages_have_in_common_is_there_once() -> None:
    assert MEMORY.weight_bytes(FIRST, FIRST) == MEMORY.weight_bytes(FIRST) == 147
    assert MEMORY.weight_bytes(SECOND, THIRD) == MEMORY.weight_bytes(THIRD)
    twice = Neighbours(loaded=((FIRST, MEMORY.pool_bytes(FIRST, 8)),))
    assert pages(147 + 160 + 160, neighbours=twice) == 8


def test_a_worker_whose_stage_nobody_knows_counts_as_this_one() -> None:
    assert pages(147 + 2 * 10 * 20, neighbours=Neighbours(unknown=1)) == 12


def test_one_that_does_not_fit_beside_others_says_what_they_need() -> None:
    """A head has no pages, and leaves all of them to the others."""
    assert pages(147 + 60 + 160, neighbours=Neighbours(expected=(HEAD,))) == 8
    said = "where they may use 366 together with other stages there, which need 60: raise --gpu-memory"
    with pytest.raises(UsageError, match=said):
        pages(366, neighbours=Neighbours(expected=(HEAD,)))
    loaded = Neighbours(loaded=((THIRD, 400),))
    with pytest.raises(UsageError, match=r"need 140 bytes for weights .* together with other stages there, which need"):
        pages(107 + 400 + 140 + 159, neighbours=loaded)
    assert pages(107 + 400 + 140 + 160, neighbours=loaded) == 8


def test_sessions_that_come_and_go_share_one_room() -> None:
    """Whatever the number of stages; a part that is small has all of its own there."""
    for limits, first, head, both, all_ in (((2, None), 147, 60, 167, 167), ((None, 120), 127, 60, 127, 127)):
        sessions, size = limits
        memory = replace(MEMORY, max_sessions=sessions, max_bytes=size)
        assert (memory.weight_bytes(FIRST), memory.weight_bytes(HEAD)) == (first, head)
        assert (memory.weight_bytes(FIRST, HEAD), memory.weight_bytes(FIRST, SECOND, HEAD)) == (both, all_)


def test_where_a_device_tells_nothing_stages_share_what_the_host_gives() -> None:
    assert pages_of_host(MEMORY, FIRST, kv_bytes=100, useful=1000) == 10
    assert pages_of_host(MEMORY, FIRST, kv_bytes=150, useful=1000, neighbours=Neighbours(expected=(SECOND,))) == 10
    assert pages_of_host(MEMORY, SECOND, kv_bytes=150, useful=1000, neighbours=Neighbours(loaded=((FIRST, 100),))) == 10
    assert pages_of_host(MEMORY, FIRST, kv_bytes=1, useful=1000) == 2
    assert pages_of_host(MEMORY, HEAD, kv_bytes=1, useful=1000) == 1000


def test_some_of_what_is_free_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as it is set there
    assert default_budget(10**10) == 87 * 10**8
    assert default_budget(10**8) == 0
    assert CudaProvider(0, NvidiaGpu("GPU-a", "H200", 2 * 10**10, 10**10, "580")).budget_bytes() == 87 * 10**8
    assert CudaProvider(0, NvidiaGpu("GPU-b", "GB10", None, None, "580")).budget_bytes() is None


@pytest.mark.parametrize("kind", ["fp32", "w8a8", "mixed"])
def test_it_is_what_the_weights_take(kind: str, request: pytest.FixtureRequest) -> None:
    folder: BlockFolder = request.getfixturevalue(kind)
    told = OnnxExecutors(open_provider("cpu")).memory(folder)
    held = [
        sum(one.nbytes for one in block_weights(folder, block, "float32", form).values())
        for block, form in forms_of(folder.manifest, (4, 8)).items()
    ]
    assert list(told.block_bytes) == held
    assert told.table_bytes == sum(table.astype("float32").nbytes for table in folder.rotary())
    assert told.budget_bytes is None and told.device == "cpu"


def test_the_process_of_a_device_tells_it(fp32: BlockFolder) -> None:
    executors = DeviceExecutors(fp32, Gpu("cpu", 5.0))
    assert executors.memory(fp32) == OnnxExecutors(open_provider("cpu")).memory(fp32)
    executors.close()
