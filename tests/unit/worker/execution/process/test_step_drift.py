"""A device that becomes slower at the same work is due for a clean-up, then for renewal."""

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.process.care import DeviceCare
from blockrelay_worker.execution.process.stage import DeviceStage
from blockrelay_worker.execution.process.step_drift import SAMPLE, SHAPES, StepDrift, StepShape, has_grown, shape_of
from blockrelay_worker.policy import RENEWAL_ASK_S
from tests.support.worker.devices import Clock, Misbehaving, device_metrics

pytestmark = pytest.mark.thorough

SHAPE = StepShape(rows=4, sequences=4, context=50)


def steps(drift: StepDrift, seconds: float, *, shape: StepShape = SHAPE, count: int = SAMPLE) -> None:
    for _ in range(count):
        drift.add(shape, seconds)


def test_half_as_long_again_is_too_long_by_the_medians() -> None:
    assert has_grown([1.0, 1.0, 9.0], [1.5, 0.1, 1.6])
    assert not has_grown([1.0, 1.0, 1.0], [1.4, 1.4, 99.0])


def segments(*parts: tuple[int, int]) -> list[Segment]:
    return [Segment(rows=rows, first_position=first, pages=()) for rows, first in parts]


def test_steps_are_alike_in_rows_and_sequences_and_nearly_in_context() -> None:
    one = shape_of(segments((1, 999)))
    assert one == shape_of(segments((1, 1020)))
    assert one != shape_of(segments((1, 1200))) != shape_of(segments((2, 1199)))
    assert shape_of(segments((1, 99), (1, 99))) != shape_of(segments((2, 198)))


def test_first_a_clean_up_then_a_renewal() -> None:
    drift = StepDrift()
    steps(drift, 0.010)
    steps(drift, 0.014)
    assert drift.due is None, "not by half"
    steps(drift, 0.015, count=SAMPLE - 1)
    assert drift.due is None, "not for long enough"
    steps(drift, 0.015, count=1)
    assert drift.due == "clean_up"
    drift.was_cleaned()
    steps(drift, 0.015)
    assert drift.due == "renewal"
    steps(drift, 0.010)
    assert drift.due == "renewal", "until it is done"


def test_a_clean_up_that_helps_is_all_until_the_next_time() -> None:
    drift = StepDrift()
    for _ in range(3):
        steps(drift, 0.010)
        steps(drift, 0.020)
        assert drift.due == "clean_up"
        drift.was_cleaned()
        steps(drift, 0.010)
        assert drift.due is None


def test_other_work_is_no_drift() -> None:
    """Longer contexts, more rows: slower, and not by any fault of the device."""
    drift = StepDrift()
    for size in range(1, 40):
        steps(drift, 0.001 * size, shape=StepShape(size, size, size), count=2 * SAMPLE)
    assert drift.due is None


def test_what_is_remembered_is_bounded_and_what_comes_often_stays() -> None:
    drift = StepDrift()
    steps(drift, 0.010)
    for number in range(10 * SHAPES):
        drift.add(StepShape(1, 1, number), 0.001)
        drift.add(SHAPE, 0.010)
    steps(drift, 0.030, count=2 * SAMPLE)
    assert drift.due == "clean_up"
    times = drift._times  # pyright: ignore[reportPrivateUsage]
    assert len(times) == SHAPES and all(len(one.first) + len(one.latest) <= 2 * SAMPLE for one in times.values())


def run(stage: DeviceStage, care: DeviceCare, count: int) -> None:
    batch = Batch(segments=[Segment(rows=1, first_position=0, pages=(0,))], tokens=np.array([5], np.int32))
    for _ in range(count):
        stage.run(batch)
        care.between_steps()


@pytest.mark.parametrize("helps", [True, False])
def test_a_process_whose_steps_get_slower(misbehaving: Misbehaving, fp32: BlockFolder, helps: bool) -> None:
    """A real one: it is cleaned up, and that is all if it helps; else it is renewed when its turn comes."""
    slow = {"SLOW_FROM": str(SAMPLE + 1)} | ({"CLEANING_HELPS": "1"} if helps else {})
    executors = misbehaving(**slow)
    stage, metrics, clock, turns = executors.load(fp32, 1, 5, pages=8), device_metrics(), Clock(), list[bool]()

    def may_renew() -> bool:
        turns.append(len(turns) > 0)  # another device has it first
        return turns[-1]

    care = DeviceCare(stage, metrics.group, canary_every_s=1e9, may_renew=may_renew, drain_s=5.0, clock=clock)
    run(stage, care, 2 * SAMPLE - 1)
    assert metrics.value("device_cleanups") == 0
    run(stage, care, 1)
    assert metrics.value("device_cleanups") == 1 and not care.renews
    run(stage, care, SAMPLE)
    assert turns == ([] if helps else [False]) and not care.renews
    run(stage, care, 3)
    clock.now += RENEWAL_ASK_S
    run(stage, care, SAMPLE)
    assert turns == ([] if helps else [False, True]) and care.renews == (not helps)
    assert metrics.value("device_cleanups") == 1
    if helps:
        return
    clock.now += 4.9
    assert not care.leaves_now
    clock.now += 0.1
    assert care.leaves_now and executors.may_be_renewed
    executors.renew()
    assert not stage.usable and executors.usable_in_s() == 0.0, "no loss, no waiting"
    again = executors.load(fp32, 1, 5, pages=8)
    run(again, DeviceCare(again, metrics.group, canary_every_s=1e9), 1)
    assert not executors.may_be_renewed and not executors.in_quarantine


def test_a_stage_computes_the_same_behind_a_clean_up(misbehaving: Misbehaving, fp32: BlockFolder) -> None:
    stage = misbehaving().load(fp32, 1, 5, pages=8)
    prompt = Batch(
        segments=[Segment(rows=20, first_position=0, pages=(3, 1))],
        tokens=np.arange(5, 25, dtype=np.int32),
        wanted=[19],
    )
    found: list[bytes] = []
    for _ in range(2):
        logits = stage.run(prompt).logits
        assert logits is not None
        found += [logits.tobytes(), *(half.tobytes() for layer in stage.export_pages([3])[0] for half in layer)]
        stage.clean_up()
    assert found[: len(found) // 2] == found[len(found) // 2 :]
