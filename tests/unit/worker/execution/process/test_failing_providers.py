"""Each row of the table of failures, raised in a real device process: the process goes on or ends."""

from collections.abc import Callable

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import DeviceFailed, DeviceLost
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.failures import TABLE
from blockrelay_worker.execution.process.care import DeviceCare
from blockrelay_worker.execution.process.stage import DeviceStage
from tests.support.worker.devices import Misbehaving, device_metrics

pytestmark = pytest.mark.thorough

StageThatFails = Callable[[str, str], DeviceStage]


@pytest.fixture
def failing(fp32: BlockFolder, misbehaving: Misbehaving) -> StageThatFails:
    """A stage whose provider says a text at the runs that are named, such as 1,2."""
    return lambda text, at: misbehaving(FAIL_TEXT=text, FAIL_AT=at).load(fp32, 1, fp32.model.blocks, pages=8)


def run(stage: DeviceStage) -> None:
    stage.run(Batch(segments=[Segment(rows=1, first_position=0, pages=(0,))], tokens=np.array([5], np.int32)))


@pytest.mark.parametrize("number", range(len(TABLE)), ids=[row.reason for row in TABLE])
def test_every_row_of_the_table(failing: StageThatFails, number: int) -> None:
    row = TABLE[number]
    stage = failing(f"Non-zero status code running MatMul. Name:'block_3/up' {row.texts[0]}", "1")
    with pytest.raises((DeviceFailed, DeviceLost), match="block_3/up") as failed:
        run(stage)
    error = failed.value
    assert (error.reason, error.code, error.block) == (row.reason, row.code, "block_3")
    assert isinstance(error, DeviceLost) == (row.kind == "device") == (not stage.usable)
    if isinstance(error, DeviceFailed):
        assert error.capacity == (row.kind == "capacity")
        run(stage)  # it has outlived that


def test_what_nobody_knows_is_tried_three_times_and_its_device_is_lost_the_second_time(failing: StageThatFails) -> None:
    stage, told = failing("moon phase", "1,2,4,5,6,8,9,10"), device_metrics()
    care = DeviceCare(stage, told.group, canary_every_s=1e9)
    run(stage)
    care.between_steps()
    assert told.value("device_retries") == 2, "the third has passed"
    with pytest.raises(DeviceFailed) as failed:
        run(stage)
    assert failed.value.reason == "unknown" and not failed.value.capacity
    run(stage)
    care.between_steps()
    assert told.value("device_retries") == 4
    with pytest.raises(DeviceLost) as lost:
        run(stage)
    assert lost.value.reason == "unknown_twice" and not stage.usable


def test_a_device_that_computes_wrong_numbers_when_it_is_loaded_is_lost(
    misbehaving: Misbehaving, fp32: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose canary is wrong: it is left alone for a while, and its worker lives."""
    executors = misbehaving(WRONG_AT="load")
    with pytest.raises(DeviceLost, match="cpu computes wrong numbers") as caught:
        executors.load(fp32, 1, 1, pages=8)
    assert (caught.value.reason, caught.value.block) == ("canary", "block_1")
    assert executors.usable_in_s() > 0 and (executors.losses, executors.last_loss) == (1, "canary")
    monkeypatch.delenv("WRONG_AT")
    assert executors.load(fp32, 1, 1, pages=8).usable, "in a new process"


def test_a_stage_is_made_in_three_tries(fp32: BlockFolder, misbehaving: Misbehaving) -> None:
    executors, told = misbehaving(LOADS_FAIL="2", FAIL_TEXT="moon phase"), device_metrics()
    stage = executors.load(fp32, 1, fp32.model.blocks, pages=8)
    DeviceCare(stage, told.group, canary_every_s=1e9).between_steps()
    assert told.value("device_retries") == 2
    run(stage)


@pytest.mark.parametrize(
    ("text", "fails", "reason"), [("moon phase", "3", "unknown"), ("out of memory", "1", "out_of_memory")]
)
def test_a_device_on_which_a_stage_cannot_be_made_is_lost(
    fp32: BlockFolder, misbehaving: Misbehaving, text: str, fails: str, reason: str
) -> None:
    executors = misbehaving(LOADS_FAIL=fails, FAIL_TEXT=text)
    with pytest.raises(DeviceLost, match=text) as lost:
        executors.load(fp32, 1, fp32.model.blocks, pages=8)
    assert lost.value.reason == reason == executors.unable
    assert executors.losses == 1 and executors.usable_in_s() > 0
