"""Canaries of a device that serves, in a real process of its own."""

from collections.abc import Iterator

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import DeviceLost
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.known_answers import STEPS
from blockrelay_worker.execution.process.care import DeviceCare
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from blockrelay_worker.execution.process.stage import DeviceStage
from tests.support.worker.devices import Clock, Misbehaving, Told, device_metrics

pytestmark = pytest.mark.thorough

PROMPT = Batch(
    segments=[Segment(rows=20, first_position=0, pages=(3, 1))], tokens=np.arange(5, 25, dtype=np.int32), wanted=[19]
)
NEXT = Batch(segments=[Segment(rows=1, first_position=20, pages=(3, 1))], tokens=np.array([7], np.int32), wanted=[0])


@pytest.fixture
def executors(fp32: BlockFolder) -> Iterator[DeviceExecutors]:
    made = DeviceExecutors(fp32, Gpu("cpu", 5.0))
    yield made
    made.close()


def canaries(told: Told) -> dict[str, float]:
    return {result: told.value("canaries", result=result) for result in ("right", "wrong", "failed")}


def bits(stage: DeviceStage, batch: Batch) -> bytes:
    logits = stage.run(batch).logits
    assert logits is not None
    return logits.tobytes()


@pytest.mark.parametrize(("first", "last"), [(1, 5), (2, 3), (5, 5)])
def test_every_known_step_comes_again_and_no_page_of_a_run_is_touched(
    executors: DeviceExecutors, fp32: BlockFolder, first: int, last: int
) -> None:
    stage = executors.load(fp32, first, last, pages=8)
    assert stage.pool.pages == 8, "those of canaries are not counted"
    rows = np.random.default_rng(3).standard_normal((20, fp32.model.hidden_size)).astype(np.float32)
    tokens, hidden = (PROMPT.tokens, None) if first == 1 else (None, rows)
    stage.run(Batch(segments=PROMPT.segments, tokens=tokens, hidden=hidden))
    before = [[half.tobytes() for half in layer] for page in stage.export_pages(range(8)) for layer in page]
    told, clock = device_metrics(), Clock()
    care = DeviceCare(stage, told.group, canary_every_s=600, clock=clock)
    for _ in range(len(STEPS) + 2):
        clock.now += 599
        care.between_steps()
        clock.now += 1
        care.between_steps()
    assert canaries(told) == {"right": len(STEPS) + 2, "wrong": 0, "failed": 0}
    assert before == [[half.tobytes() for half in layer] for page in stage.export_pages(range(8)) for layer in page]


def test_a_request_goes_on_behind_canaries_as_without(executors: DeviceExecutors, fp32: BlockFolder) -> None:
    stage = executors.load(fp32, 1, 5, pages=8)
    alone = bits(stage, PROMPT), bits(stage, NEXT)
    beside = [bits(stage, PROMPT)]
    for _ in STEPS:
        stage.canary()
    assert (*beside, bits(stage, NEXT)) == alone


@pytest.mark.parametrize("wrong_from", [1, 4, 12])
def test_a_wrong_answer_loses_the_device(misbehaving: Misbehaving, fp32: BlockFolder, wrong_from: int) -> None:
    executors = misbehaving(WRONG_FROM=str(wrong_from))
    stage, told, clock = executors.load(fp32, 1, 5, pages=8), device_metrics(), Clock()
    care = DeviceCare(stage, told.group, canary_every_s=1, clock=clock)
    for _ in range(wrong_from - 1):
        clock.now += 1
        care.between_steps()
    clock.now += 1
    with pytest.raises(DeviceLost, match="computes wrong numbers in block_1 to block_5") as lost:
        care.between_steps()
    assert (lost.value.reason, lost.value.code) == ("canary", "INTERNAL") and not stage.usable
    assert canaries(told) == {"right": wrong_from - 1, "wrong": 1, "failed": 0}
    assert 0 < executors.usable_in_s() <= 1, "like any device that was lost"


def test_one_that_gives_none_for_want_of_room_is_asked_again(misbehaving: Misbehaving, fp32: BlockFolder) -> None:
    stage = misbehaving(FAIL_AT="1", FAIL_TEXT="out of memory").load(fp32, 1, 5, pages=8)
    told, clock = device_metrics(), Clock()
    care = DeviceCare(stage, told.group, canary_every_s=1, clock=clock)
    for _ in range(2):
        clock.now += 1
        care.between_steps()
    assert canaries(told) == {"right": 1, "wrong": 0, "failed": 1} and stage.usable
