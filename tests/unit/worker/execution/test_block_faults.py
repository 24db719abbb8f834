"""Every executor names the block that made a row NaN or infinite, and the times of the blocks up to it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import ExecutionError
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fault_injection import SaltedExecutor, SlowedExecutor
from blockrelay_worker.execution.loader import Executors
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.probe import failure
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from tests.support.models.planted_overflow import IN_FLOAT16, IN_FLOAT32, OVERFLOWING, overflowing_model

BLOCK, PAGES = 3, 8
Load = Callable[[int, int], Executor]


def process(folder: BlockFolder) -> DeviceExecutors:
    return DeviceExecutors(folder, Gpu("cpu", 60))


KINDS: dict[str, Callable[[BlockFolder], Executors | OnnxExecutors]] = {
    "kernels": lambda folder: CpuExecutors(1),
    "onnx": lambda folder: OnnxExecutors(open_provider("cpu")),
    "process": process,
    "webgpu": lambda folder: OnnxExecutors(open_provider("webgpu:0")),
}
MARKS = {"webgpu": [pytest.mark.software_gpu]}


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=MARKS.get(kind, [])) for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["w8a8", "fp32"])
def folder(request: pytest.FixtureRequest, kind: str, tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    narrow = request.param != "fp32" and kind == "webgpu" and not failure(open_provider("webgpu:0"), "float16")
    root = tmp_path_factory.mktemp("overflowing")
    return overflowing_model(root, request.param, block=BLOCK, weight=IN_FLOAT16 if narrow else IN_FLOAT32)


@pytest.fixture
def processes_may_stay() -> bool:
    """That of the device, until the last test."""
    return True


@pytest.fixture(scope="module")
def load(kind: str, folder: BlockFolder) -> Iterator[Load]:
    """Loads blocks first to last, once for all tests."""
    with ExitStack() as stack:
        executors = KINDS[kind](folder)
        if isinstance(executors, DeviceExecutors):
            stack.callback(executors.close)

        @functools.cache
        def one(first: int, last: int) -> Executor:
            executor = executors.load(folder, first, last, pages=PAGES)
            stack.callback(executor.close)
            return executor

        yield one


def prompt(*tokens: int, wanted: tuple[int, ...] = ()) -> Batch:
    return Batch(
        segments=[Segment(rows=len(tokens), first_position=0, pages=[2])],
        tokens=np.array(tokens, np.int32),
        wanted=wanted,
    )


def test_the_block_is_named_with_the_seconds_of_those_before_it(folder: BlockFolder, load: Load) -> None:
    executor = load(1, folder.model.blocks)
    bad, good = prompt(5, OVERFLOWING, 7, wanted=(2,)), prompt(5, 6, 7, wanted=(2,))
    assert executor.run(bad).not_finite == (0,)
    fault = executor.first_not_finite(bad)
    assert fault is not None and fault.block == f"block_{BLOCK}"
    assert list(fault.seconds) == ["block_1", "block_2", "block_3"] and all(fault.seconds.values())
    assert executor.first_not_finite(good) is None


def test_looking_changes_no_page_of_others_and_no_bit_of_what_follows(folder: BlockFolder, load: Load) -> None:
    executor = load(1, folder.model.blocks)
    other = replace(prompt(9, 8, 7, wanted=(2,)), segments=[Segment(rows=3, first_position=0, pages=[5])])
    expected = executor.run(other).logits
    assert expected is not None
    expected = expected.copy()
    behind = Batch(segments=[Segment(rows=1, first_position=3, pages=[5])], tokens=np.array([4], np.int32), wanted=[0])
    next_row = executor.run(behind).logits
    assert next_row is not None
    next_row = next_row.copy()
    for rows in (prompt(OVERFLOWING, 3), prompt(1, 2, 3, wanted=(0, 2))):
        executor.first_not_finite(rows)
    again = executor.run(behind).logits
    assert again is not None and again.tobytes() == next_row.tobytes()
    again = executor.run(other).logits
    assert again is not None and again.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("first", "last"), [(2, 4), (3, 3), (4, 5), (5, 5)])
def test_rows_that_come_so_are_the_first_block_s(folder: BlockFolder, load: Load, first: int, last: int) -> None:
    """A stage that was given what is not finite names its first block that shows it; the head looks at all rows."""
    executor = load(first, last)
    rows = np.random.default_rng(2).uniform(-1, 1, (3, folder.model.hidden_size)).astype(np.float32)
    batch = Batch(segments=[Segment(rows=3, first_position=0, pages=[2])], hidden=rows, wanted=())
    assert executor.first_not_finite(batch) is None
    rows[1, 3] = np.nan
    fault = executor.first_not_finite(batch)
    assert fault is not None and list(fault.seconds) == [fault.block] == [f"block_{first}"]


def test_what_makes_no_sense_is_refused(folder: BlockFolder, load: Load) -> None:
    executor = load(1, folder.model.blocks)
    with pytest.raises(ExecutionError, match="a page id"):
        executor.first_not_finite(replace(prompt(5), segments=[Segment(rows=1, first_position=0, pages=[PAGES])]))
    assert executor.first_not_finite(prompt(5)) is None


@pytest.mark.parametrize("precision", ["w8a8", "fp32"])
def test_what_stands_in_front_of_a_stage_to_inject_faults_lets_it_look(precision: str, tmp_path: Path) -> None:
    folder = overflowing_model(tmp_path, precision, block=BLOCK)
    stage = CpuExecutors(1).load(folder, 1, folder.model.blocks, pages=PAGES)
    slowed = SlowedExecutor(stage, speed=0.5).first_not_finite(prompt(OVERFLOWING))
    assert slowed is not None and slowed.block == f"block_{BLOCK}"
    salted = SaltedExecutor(stage, salt="b", vocabulary=folder.model.vocab_size)
    (read_so,) = (token for token in range(folder.model.vocab_size) if salted.run(prompt(token)).not_finite)
    assert read_so != OVERFLOWING and salted.first_not_finite(prompt(read_so))
    assert salted.first_not_finite(prompt(OVERFLOWING)) is None, "it reads another token"
    stage.close()
