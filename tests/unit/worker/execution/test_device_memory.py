"""How much of a device a stage takes, and what is left for KV pages."""

import sys

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import UsageError
from blockrelay_worker.execution.device_memory import DeviceMemory, default_budget, pages_within
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.cuda import CudaProvider
from blockrelay_worker.execution.onnx.providers.nvidia_driver import NvidiaGpu
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.weights import bits_of, block_weights
from blockrelay_worker.execution.process.stage import DeviceExecutors

MEMORY = DeviceMemory(device="cuda:0", block_bytes=[100, 40, 40, 60], table_bytes=7, least_pages=8, budget_bytes=None)


def pages(budget: int, *, first: int = 1, last: int = 2, page: int = 10, useful: int = 1000) -> int:
    return pages_within(MEMORY, first, last, budget_bytes=budget, page_bytes=page, useful=useful)


def test_pages_get_what_weights_leave() -> None:
    assert pages(147 + 80) == 8
    assert pages(147 + 129) == 12
    assert pages(147 + 129, last=1) == 16
    assert pages(10**6) == 1000
    assert pages(10**6, useful=3) == 8, "with fewer it is no stage"


def test_the_head_alone_has_neither_tables_nor_pages() -> None:
    assert MEMORY.weight_bytes(4, 4) == 60 and MEMORY.weight_bytes(3, 4) == 107
    assert pages(60, first=4, last=4, page=0) == 1000
    with pytest.raises(UsageError, match="block_4 to block_4 need 60 bytes"):
        pages(59, first=4, last=4, page=0)


def test_a_stage_that_does_not_fit_says_by_how_much() -> None:
    said = (
        "block_1 to block_2 need 147 bytes for weights and 80 for 8 KV pages on cuda:0, where they may use 226: raise"
    )
    with pytest.raises(UsageError, match=said):
        pages(226)


def test_some_of_what_is_free_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as it is set there
    assert default_budget(10**10) == 87 * 10**8
    assert default_budget(10**8) == 0
    assert CudaProvider(0, NvidiaGpu("GPU-a", "H200", 2 * 10**10, 10**10, "580")).budget_bytes() == 87 * 10**8
    assert CudaProvider(0, NvidiaGpu("GPU-b", "GB10", None, None, "580")).budget_bytes() is None


@pytest.mark.parametrize("kind", ["fp32", "w8a8", "mixed"])
def test_it_is_what_the_weights_take(kind: str, request: pytest.FixtureRequest) -> None:
    folder: BlockFolder = request.getfixturevalue(kind)
    told, bits = OnnxExecutors(open_provider("cpu")).memory(folder), bits_of(folder.manifest, (4, 8))
    held = [
        sum(one.nbytes for one in block_weights(folder, block, "float32", bits.get(block, 0)).values())
        for block in range(1, folder.model.blocks + 1)
    ]
    assert list(told.block_bytes) == held
    assert told.table_bytes == sum(table.astype("float32").nbytes for table in folder.rotary())
    assert told.budget_bytes is None and told.device == "cpu"


def test_the_process_of_a_device_tells_it(fp32: BlockFolder) -> None:
    executors = DeviceExecutors("cpu", fp32, python=sys.executable, limit_s=5.0)
    assert executors.memory(fp32) == OnnxExecutors(open_provider("cpu")).memory(fp32)
    executors.close()
