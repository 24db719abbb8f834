"""The decision after a failure on a device: it depends on the reason, the tries so far and the time left."""

import pytest

from blockrelay.errors import BlockFolderError, ExecutionError, UsageError
from blockrelay_worker.execution.onnx.failures import TABLE
from blockrelay_worker.execution.onnx.tries import Next, Tries, TryLimits, reason_of, what_next
from tests.support.worker.devices import Clock

LIMITS = TryLimits(max_tries=3, within_s=30.0)


@pytest.mark.parametrize(
    ("tries", "expected"),
    [
        ([0.1], "again"),
        ([0.1, 0.1], "again"),
        ([0.1, 0.1, 0.1], "wait"),
        ([15.0], "again"),
        ([15.1], "wait"),
        ([1.0, 14.5], "again"),
        ([1.0, 14.6], "wait"),
        ([40.0], "wait"),
    ],
)
def test_what_may_pass_is_tried_again_while_there_are_tries_and_time(tries: list[float], expected: Next) -> None:
    """A try is expected to take as long as the longest one."""
    assert what_next("unknown", tries, LIMITS, others=False) == expected
    assert what_next("unknown", tries, LIMITS, others=True) == (expected if expected == "again" else "next_device")


@pytest.mark.parametrize("reason", ["out_of_memory", "device_limit", "refused", "unknown_twice"])
def test_what_a_device_cannot_do_another_one_may(reason: str) -> None:
    assert what_next(reason, [0.1], LIMITS, others=True) == "next_device"
    assert what_next(reason, [0.1], LIMITS, others=False) == "wait"


@pytest.mark.parametrize("reason", ["hang", "process_ended", "canary", "closed", "device_lost", "ecc_error", ""])
def test_a_device_that_is_lost_or_wrong_is_waited_for(reason: str) -> None:
    assert what_next(reason, [0.1], LIMITS, others=True) == "wait"


def test_every_loss_of_the_table_is_waited_for() -> None:
    kinds = {row.reason: (row.kind, what_next(row.reason, [0.1], LIMITS, others=True)) for row in TABLE}
    assert {expected for kind, expected in kinds.values() if kind == "device"} == {"wait"}
    assert {expected for kind, expected in kinds.values() if kind != "device"} == {"next_device"}


def failed(cause: Exception | None) -> ExecutionError:
    error = ExecutionError("block_1 failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("moon phase"), "unknown"),
        (failed(RuntimeError("moon phase")), "unknown"),
        (failed(RuntimeError("out of memory")), "out_of_memory"),
        (failed(MemoryError()), "out_of_memory"),
        (failed(None), ""),
        (failed(UsageError("no buffer so large")), ""),
        (BlockFolderError("not whole"), ""),
        (RuntimeError("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : no kernel"), ""),
    ],
)
def test_what_is_our_own_error_is_none_of_the_device(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_tries_are_counted_and_timed_from_their_beginning() -> None:
    clock, counted = Clock(), list[float]()
    tries = Tries(LIMITS, lambda: counted.append(clock.now), clock=clock)
    clock.now = 10.0
    assert tries.again(RuntimeError("moon phase"), what="a step")
    clock.now = 20.1
    assert not tries.again(RuntimeError("moon phase"), what="a step")
    assert counted == [10.0]
