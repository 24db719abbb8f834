"""A device in a process of its own: killed, stopped, closed, started again. On ONNX Runtime's own CPU kernels."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import DeviceLost, ExecutionError, UsageError
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.execution.process.device_process import DeviceProcess
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from blockrelay_worker.execution.process.frames import Message
from blockrelay_worker.execution.process.stage import DeviceStage
from blockrelay_worker.execution.selection import Largest, Need

pytestmark = pytest.mark.thorough

LIMIT_S = 1.0
PROMPT = np.arange(5, 25, dtype=np.int32)


@pytest.fixture
def executors(fp32: BlockFolder) -> Iterator[DeviceExecutors]:
    made = DeviceExecutors(fp32, Gpu("cpu", LIMIT_S))
    yield made
    made.close()


def whole(executors: DeviceExecutors, folder: BlockFolder) -> DeviceStage:
    return executors.load(folder, 1, folder.model.blocks, pages=8)


def logits(stage: Executor) -> NDArray[np.float32]:
    batch = Batch(segments=[Segment(rows=20, first_position=0, pages=(3, 1))], tokens=PROMPT, wanted=[19])
    found = stage.run(batch).logits
    assert found is not None
    return found.copy()


def pid_of(executors: DeviceExecutors) -> int:
    return executors._process.pid  # pyright: ignore[reportPrivateUsage]


def test_it_gives_what_it_gives_in_our_own_process(executors: DeviceExecutors, fp32: BlockFolder) -> None:
    ours = OnnxExecutors(CpuProvider())
    assert executors.numerics_id(fp32.manifest) == ours.numerics_id(fp32.manifest)
    there, here = whole(executors, fp32), ours.load(fp32, 1, fp32.model.blocks, pages=8)
    assert logits(there).tobytes() == logits(here).tobytes()
    assert there.capabilities == here.capabilities and there.layout == here.layout
    (came,), (own,) = there.export_pages([3]), here.export_pages([3])
    for (keys, values), (own_keys, own_values) in zip(came, own, strict=True):
        assert keys.tobytes() == own_keys.tobytes() and values.tobytes() == own_values.tobytes()


def test_stages_of_one_device_share_its_process(executors: DeviceExecutors, fp32: BlockFolder) -> None:
    first, second = executors.load(fp32, 1, 1, pages=8), executors.load(fp32, 2, fp32.model.blocks, pages=8)
    segments = [Segment(rows=20, first_position=0, pages=(3, 1))]
    hidden = first.run(Batch(segments=segments, tokens=PROMPT)).hidden
    found = second.run(Batch(segments=segments, hidden=hidden, wanted=[19])).logits
    assert found is not None
    np.testing.assert_allclose(found, logits(whole(executors, fp32)), rtol=0, atol=1e-5)
    first.close()
    assert executors.usable_in_s() == 0.0


def test_less_than_a_row_of_logits_comes_as_it_is(executors: DeviceExecutors, fp32: BlockFolder) -> None:
    there, here = whole(executors, fp32), OnnxExecutors(CpuProvider()).load(fp32, 1, fp32.model.blocks, pages=8)
    needs = [Need(temperature=0.0), None, Need(temperature=0.5, top_p=0.9), Need(temperature=0.5, top_k=7)]
    segments = [Segment(rows=20, first_position=0, pages=(3, 1))]
    batch = Batch(segments=segments, tokens=PROMPT, wanted=[7, 12, 17, 19], needs=needs)
    came, own = there.run(batch).rows, here.run(batch).rows
    assert came is not None and own is not None
    assert [type(row) for row in came] == [type(row) for row in own] == [Largest, np.ndarray, Largest, Largest]
    for one, other in zip(came, own, strict=True):
        if isinstance(one, Largest) and isinstance(other, Largest):
            assert one.ids.tolist() == other.ids.tolist() and one.total == other.total
            assert one.logits.tobytes() == other.logits.tobytes()
        else:
            assert np.array_equal(np.asarray(one), np.asarray(other))


def test_a_batch_that_makes_no_sense_is_our_own_error(executors: DeviceExecutors, fp32: BlockFolder) -> None:
    stage = whole(executors, fp32)
    with pytest.raises(ExecutionError, match="a page id is not in") as refused:
        stage.run(Batch(segments=[Segment(rows=1, first_position=0, pages=(99,))], tokens=PROMPT[:1]))
    assert not isinstance(refused.value, DeviceLost)
    assert logits(stage).shape == (1, fp32.model.vocab_size)


def test_a_process_that_is_killed_is_lost_and_begun_again(executors: DeviceExecutors, fp32: BlockFolder) -> None:
    stage = whole(executors, fp32)
    before = logits(stage)
    os.kill(pid_of(executors), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(DeviceLost, match="has ended by signal 9") as lost:
            logits(stage)
        assert (lost.value.reason, lost.value.code) == ("process_ended", "INTERNAL")
    assert 0 < executors.usable_in_s() <= 1 and not executors.in_quarantine
    assert logits(whole(executors, fp32)).tobytes() == before.tobytes()
    with pytest.raises(DeviceLost):
        logits(stage)  # the stage of the process that is gone is gone with it
    stage.close()


def test_one_that_hangs_is_ended_in_time(executors: DeviceExecutors, fp32: BlockFolder) -> None:
    stage, pid = whole(executors, fp32), pid_of(executors)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(DeviceLost, match=r"gave no answer for 1 s") as lost:
        logits(stage)
    assert (lost.value.reason, lost.value.code) == ("hang", "TIMEOUT")
    assert time.monotonic() - began < LIMIT_S + 1
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_three_losses_of_late_are_quarantine(executors: DeviceExecutors, fp32: BlockFolder) -> None:
    for _ in range(3):
        assert not executors.in_quarantine
        stage = whole(executors, fp32)
        os.kill(pid_of(executors), signal.SIGKILL)
        with pytest.raises(DeviceLost):
            logits(stage)
        executors.usable_in_s()
    assert executors.in_quarantine and executors.usable_in_s() > 3590


def test_a_device_that_is_not_there_is_a_matter_of_settings(fp32: BlockFolder) -> None:
    with pytest.raises(UsageError, match="'abacus:0' is not a device of ONNX Runtime"):
        DeviceExecutors(fp32, Gpu("abacus:0", LIMIT_S))


def test_it_dies_with_its_worker() -> None:
    """Which has no time to say so: kill -9."""
    program = """
        import os, signal
        from blockrelay_worker.execution.process.device_process import DeviceProcess
        print(DeviceProcess("cpu").pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    worker = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, check=False)
    pid, until = int(worker.stdout), time.monotonic() + 1
    while _lives(pid):
        assert time.monotonic() < until, "it outlived its worker by a second"
        time.sleep(0.01)


def test_it_can_be_closed_twice_and_asked_no_more() -> None:
    process = DeviceProcess("cpu")
    process.close()
    process.close()
    assert not _lives(process.pid)
    with pytest.raises(DeviceLost):
        process.ask(Message("open", {"device": "cpu", "folder": "."}), limit_s=1)


def _lives(pid: int) -> bool:
    """A zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
