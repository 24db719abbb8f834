"""Memory that a device's process keeps after its stages have closed."""

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from blockrelay_worker.execution.self_test import fixed_rows
from tests.support.worker.onnx_devices import NAMES

LOADS, WARM, MOST_BYTES = 50, 5, 20_000_000


@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.thorough), *NAMES[1:]])
def test_fifty_loads_and_unloads_leave_little_behind(fp32: BlockFolder, device: str) -> None:
    """A layer and the head, each time with steps of one row and of 33, and pages that leave."""
    executors = DeviceExecutors(fp32, Gpu(device, 60.0))
    resident: list[int] = []
    try:
        for _ in range(LOADS):
            stage = executors.load(fp32, 4, 5, pages=64)
            for rows in (33, 1):
                segment = Segment(rows=rows, first_position=0, pages=(0, 1, 2))
                stage.run(Batch(segments=[segment], hidden=fixed_rows(fp32.model, rows), wanted=[0]))
            stage.export_pages([0, 1])
            stage.close()
            resident.append(resident_of(executors))
    finally:
        executors.close()
    grown = resident[-1] - min(resident[WARM - 1 :])  # what the first loads took may go back later
    print(f"{device}: {grown / 1e6:.1f} MB more after {LOADS} loads than at the least after {WARM}")  # noqa: T201
    assert grown < MOST_BYTES, [round(one / 1e6) for one in resident]


def resident_of(executors: DeviceExecutors) -> int:
    pid = executors._process.pid  # pyright: ignore[reportPrivateUsage]
    with open(f"/proc/{pid}/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
