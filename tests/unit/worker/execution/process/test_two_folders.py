"""A device that is opened for one model in two precisions, and serves one of them at a time."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.errors import BlockFolderError, DeviceLost, UsageError
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from tests.support.models.tiny_model import write_tiny_model

PROMPT = np.arange(5, 25, dtype=np.int32)


@pytest.fixture
def executors(w8a8: BlockFolder, w4a8: BlockFolder) -> Iterator[DeviceExecutors]:
    made = DeviceExecutors(w8a8, Gpu("cpu", 5.0, budget_bytes=1 << 30), others=[w4a8])
    yield made
    made.close()


@pytest.fixture
def other(tmp_path: Path) -> BlockFolder:
    """A folder of w4a8 that a test may damage."""
    return open_block_folder(write_tiny_model(tmp_path, "w4a8"))


def whole(executors: DeviceExecutors | OnnxExecutors, folder: BlockFolder) -> Executor:
    return executors.load(folder, 1, folder.model.blocks, pages=8)


def logits(stage: Executor) -> bytes:
    batch = Batch(segments=[Segment(rows=20, first_position=0, pages=(3, 1))], tokens=PROMPT, wanted=[19])
    found: NDArray[np.float32] | None = stage.run(batch).logits
    assert found is not None
    return found.tobytes()


def lose(executors: DeviceExecutors, stage: Executor) -> None:
    """Ends the process, and waits until its loss is known."""
    os.kill(executors._process.pid, signal.SIGKILL)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(DeviceLost):
        logits(stage)


def test_each_folder_has_the_numbers_that_it_has_alone(
    executors: DeviceExecutors, w8a8: BlockFolder, w4a8: BlockFolder
) -> None:
    for folder in (w8a8, w4a8, w8a8):
        alone = OnnxExecutors(CpuProvider())
        assert executors.serves(folder)
        assert executors.numerics_id(folder.manifest) == alone.numerics_id(folder.manifest)
        assert executors.memory(folder) == alone.memory(folder)
        stage = whole(executors, folder)
        assert stage.capabilities.numerics_id == executors.numerics_id(folder.manifest)
        assert logits(stage) == logits(whole(alone, folder))
        stage.close()
    assert executors.numerics_id(w8a8.manifest) != executors.numerics_id(w4a8.manifest)
    assert executors.memory(w8a8) != executors.memory(w4a8)


def test_both_ids_stay_when_the_process_is_lost(
    executors: DeviceExecutors, w8a8: BlockFolder, w4a8: BlockFolder
) -> None:
    before = {folder.root: executors.numerics_id(folder.manifest) for folder in (w8a8, w4a8)}
    lose(executors, whole(executors, w8a8))
    again = whole(executors, w4a8)
    assert logits(again) == logits(whole(OnnxExecutors(CpuProvider()), w4a8))
    assert executors.restart_reasons() == ["lost"]
    assert {folder.root: executors.numerics_id(folder.manifest) for folder in (w8a8, w4a8)} == before


def test_a_folder_that_the_device_refuses_is_not_served_and_the_first_one_is(
    w8a8: BlockFolder, other: BlockFolder
) -> None:
    (other.root / "manifest.json").unlink()
    executors = DeviceExecutors(w8a8, Gpu("cpu", 5.0), others=[other])
    try:
        assert executors.serves(w8a8) and not executors.serves(other)
        with pytest.raises(UsageError, match=r"cpu was not opened for w4a8"):
            executors.numerics_id(other.manifest)
        assert len(logits(whole(executors, w8a8))) == 4 * w8a8.model.vocab_size
    finally:
        executors.close()
    with pytest.raises(BlockFolderError):
        DeviceExecutors(other, Gpu("cpu", 5.0), others=[w8a8])


def test_a_folder_that_has_gone_since_is_not_served_after_a_loss(w8a8: BlockFolder, other: BlockFolder) -> None:
    executors = DeviceExecutors(w8a8, Gpu("cpu", 5.0), others=[other])
    try:
        stage = whole(executors, w8a8)
        assert executors.serves(other)
        (other.root / "manifest.json").unlink()
        lose(executors, stage)
        assert logits(whole(executors, w8a8)) and not executors.serves(other)
    finally:
        executors.close()


def test_weights_of_a_folder_go_when_the_other_one_is_loaded(w8a8: BlockFolder, w4a8: BlockFolder) -> None:
    """Weights that a stage uses stay on the device as long as the stage does, and count as used memory."""
    executors = OnnxExecutors(CpuProvider())
    blocks, room = w8a8.model.blocks, 1 << 30

    def load(folder: BlockFolder, first: int, last: int) -> Executor:
        return executors.load(folder, first, last, pages=8, weight_room=room)

    first, second = load(w8a8, 1, 2), load(w8a8, 3, blocks)
    first.close()
    assert executors.resident(w8a8, 1, blocks) == set(range(1, blocks + 1)), "they may be wanted again"
    other = load(w4a8, 1, 2)
    assert executors.resident(w8a8, 1, blocks) == set(range(3, blocks + 1))
    assert executors.resident(w4a8, 1, blocks) == {1, 2}
    second.close()
    other.close()
    load(w8a8, 1, 1)
    assert executors.resident(w4a8, 1, blocks) == set()
