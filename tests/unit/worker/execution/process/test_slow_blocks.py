"""ONNX blocks that take long: a step of many slow blocks is not a hang, a block that never ends is."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import DeviceLost
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from blockrelay_worker.execution.process.stage import DeviceStage
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks

LAYERS, LIMIT_S = 3, 1.0
BATCH = Batch(
    segments=[Segment(rows=3, first_position=0, pages=(0,))], tokens=np.array([1, 2, 3], np.int32), wanted=[2]
)


@pytest.fixture
def blocks(tmp_path: Path) -> BlockFolder:
    return opened(write_reference_blocks(tmp_path / "blocks", ReferenceModel(layers=LAYERS)), tmp_path / "cache")


@pytest.fixture
def slow(blocks: BlockFolder, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceStage]:
    """A stage of all blocks, each of which takes as long as the test says."""
    monkeypatch.setenv("BLOCK_S", request.param)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    module = "tests.support.worker.slow_blocks_child"
    executors = DeviceExecutors(blocks, Gpu("cpu", LIMIT_S), module=module)
    try:
        yield executors.load(blocks, 1, LAYERS + 1, pages=4)
    finally:
        executors.close()


@pytest.mark.parametrize("slow", ["0.5"], indirect=True)
def test_a_step_may_take_as_long_as_its_blocks_together(slow: DeviceStage) -> None:
    went_on: list[int] = []
    slow.on_progress = lambda: went_on.append(1)
    output = slow.run(BATCH)
    assert output.logits is not None and len(output.seconds) == LAYERS + 1
    assert sum(output.seconds.values()) > 2 * LIMIT_S * 0.9 and len(went_on) >= LAYERS


@pytest.mark.parametrize("slow", ["30"], indirect=True)
def test_a_block_that_takes_longer_than_a_step_may_is_a_hang(slow: DeviceStage) -> None:
    with pytest.raises(DeviceLost, match="gave no answer for 1 s"):
        slow.run(BATCH)
