"""Stages that several processes compute: the same bits as one, whatever their number; and the end of one of them."""

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.errors import DeviceLost, ExecutionError, UsageError
from blockrelay_converter.convert import convert
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.shared_loading import SharedExecutors
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.ranks.numa import bind
from blockrelay_worker.execution.ranks.shared_communicator import SharedCommunicator
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.kernels.reference import ReferenceKernels
from tests.support.models.checkpoints import write_checkpoint
from tests.support.waiting import wait_until
from tests.support.worker.stages import Chain, Part
from tests.support.worker.thread_ranks import logits_of_threads

pytestmark = pytest.mark.skipif(not load_kernels(1).has_matmul, reason="ranks need compiled kernels")

PRECISIONS = ("w8a8", "w4a8", "w8a8,block_2=w4a8")
#: By family: what is special in it.
SHAPES: dict[str, dict[str, object]] = {
    "odd heads": {
        "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 288, "intermediate_size": 416,
        "vocab_size": 517, "num_hidden_layers": 3,
    },
    "biases": {"family": "qwen2", "num_hidden_layers": 2},
    "head norms": {"family": "qwen3", "num_hidden_layers": 2},
    "tied heads": {"tie_word_embeddings": True, "num_hidden_layers": 2},
}  # fmt: skip
QUICK = {("odd heads", "w8a8"), ("biases", "w8a8,block_2=w4a8")}
TOKENS = [5 + 7 * n % 250 for n in range(40)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((shape, precision), id=f"{shape}-{precision}", marks=[] if quick else [pytest.mark.thorough])
        for shape in SHAPES
        for precision in PRECISIONS
        for quick in [(shape, precision) in QUICK]
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    shape, precision = request.param
    root = tmp_path_factory.mktemp("ranks")
    write_checkpoint(root / "checkpoint", seed=3, **SHAPES[shape])  # type: ignore[arg-type]
    convert(root / "checkpoint", root / "model", precision=precision, report=lambda *_: None, name="tiny")
    return open_block_folder(root / "model")


def batches(chain: Chain) -> list[bytes]:
    """The logits of prompts in chunks, of steps, of a draft that is run again, and of a batch of all of it."""
    found = [chain.solo(TOKENS, [17, 1, 1, 21])]
    several = [
        Part(tokens=TOKENS[:30], first_position=0, pages=[10, 11]),
        Part(tokens=TOKENS[:1], first_position=40, pages=[0, 1, 2]),
        Part(tokens=TOKENS[3:8], first_position=36, pages=[0, 1, 2][:3]),
    ]
    found.append(chain.run(several[:2]))
    found.append(chain.run([several[2]], wanted=[0, 4]))
    found.append(chain.run([several[0]], wanted=[29]))
    return [each.tobytes() for each in found]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_compute_the_bits_of_one(folder: BlockFolder, ranks: int) -> None:
    last = folder.model.blocks
    shared = Chain(folder, [1, last] if ranks == 3 else None, variant="native", ranks=ranks)
    try:
        assert batches(shared) == batches(Chain(folder, variant="native"))
    finally:
        shared.close()


def test_ranks_that_are_threads_compute_the_bits_of_one(w8a8: BlockFolder, w4a8: BlockFolder) -> None:
    """Without our kernels and without processes: by NumPy alone."""
    for folder in (w8a8, w4a8):
        expected = Chain(folder, variant="native").solo(TOKENS[:20], [20])
        for ranks in (2, 3):
            found = logits_of_threads(folder, TOKENS[:20], ranks=ranks, kernels=ReferenceKernels(), backend="exact")
            assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [2, 4])
def test_pages_of_ranks_serve_one_process_and_back(w8a8: BlockFolder, ranks: int) -> None:
    """With four ranks, two have the same key and value head."""
    alone, shared = Chain(w8a8, variant="native"), Chain(w8a8, variant="native", ranks=ranks)
    try:
        expected = alone.solo(TOKENS, [32, 8])[32:]
        shared.solo(TOKENS[:32], [32])
        behind = Part(tokens=TOKENS[32:], first_position=32, pages=[50, 51, 52])
        for source, target in ((shared, alone), (alone, shared)):
            contents = source.stages[0].export_pages([0, 1])
            target.stages[0].import_pages([50, 51], contents)
            assert target.run([behind]).tobytes() == expected.tobytes()
    finally:
        shared.close()


@pytest.fixture
def stage(w8a8: BlockFolder) -> Iterator[StageExecutor]:
    loaded = SharedExecutors(w8a8, ranks=2, threads=1).load(w8a8, 1, w8a8.model.blocks, pages=8)
    yield loaded
    loaded.close()


def prompt() -> Batch:
    return Batch(
        segments=[Segment(rows=3, first_position=0, pages=[2])], tokens=np.array([5, 6, 7], np.int32), wanted=[2]
    )


def pid_of_rank(stage: StageExecutor) -> int:
    assert stage.group is not None
    return stage.group.pids[0]


def test_the_death_of_a_rank_is_noticed_while_nothing_is_computed(stage: StageExecutor) -> None:
    told = threading.Event()
    assert stage.group is not None and stage.usable
    stage.group.when_lost = told.set
    os.kill(pid_of_rank(stage), signal.SIGKILL)
    wait_until(told.is_set, "the worker hears of it")
    assert not stage.usable
    with pytest.raises(DeviceLost, match="rank 1 has ended by SIGKILL") as caught:
        stage.run(prompt())
    assert caught.value.reason == "rank_ended"


def test_the_death_of_a_rank_ends_the_step_that_waits_for_it(stage: StageExecutor) -> None:
    stage.run(prompt())
    pid, lost = pid_of_rank(stage), list[DeviceLost]()
    os.kill(pid, signal.SIGSTOP)

    def step() -> None:
        with pytest.raises(DeviceLost) as caught:
            stage.run(prompt())
        lost.append(caught.value)

    thread = threading.Thread(target=step)
    thread.start()
    os.kill(pid, signal.SIGKILL)
    thread.join(30)
    assert lost and "SIGKILL" in str(lost[0])


def test_a_step_that_fails_here_ends_the_ranks_that_wait_for_it(
    stage: StageExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **options: object) -> object:
        raise MemoryError("no memory")

    monkeypatch.setattr("blockrelay_worker.execution.cpu.block_calls.BlockCalls.program", fails)
    with pytest.raises(DeviceLost, match="rank 0 failed: no memory"):
        stage.run(prompt())
    assert not stage.usable
    pid = pid_of_rank(stage)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the other rank has ended")


def test_a_rank_that_hangs_while_it_is_loaded_is_ended(w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockrelay_worker.execution.ranks.group.LOAD_LIMIT_S", 0.05)
    with pytest.raises(DeviceLost, match="rank 1 has ended by SIGKILL"):
        SharedExecutors(w8a8, ranks=2, threads=1).load(w8a8, 1, w8a8.model.blocks, pages=4)


def test_a_rank_that_dies_in_three_loads_in_a_row_ends_the_worker(
    w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors = SharedExecutors(w8a8, ranks=2, threads=1)
    monkeypatch.setattr("blockrelay_worker.execution.ranks.group.LOAD_LIMIT_S", 0.05)
    for _ in range(2):
        with pytest.raises(DeviceLost):
            executors.load(w8a8, 1, 2, pages=4)
    with pytest.raises(ExecutionError, match="3 times in a row while a stage was loaded"):
        executors.load(w8a8, 1, 2, pages=4)


def test_signals_of_a_terminal_do_not_end_a_rank(stage: StageExecutor) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid_of_rank(stage), number)
    assert stage.run(prompt()).not_finite == () and stage.usable


def test_a_bad_batch_is_refused_and_the_ranks_go_on(stage: StageExecutor) -> None:
    expected = stage.run(prompt()).logits
    assert expected is not None
    expected = expected.copy()
    bad = Batch(segments=[Segment(rows=1, first_position=0, pages=[99])], tokens=np.array([1], np.int32))
    with pytest.raises(ExecutionError, match="a page id is not in"):
        stage.run(bad)
    again = stage.run(prompt()).logits
    assert again is not None and again.tobytes() == expected.tobytes()


def test_a_rank_of_another_release_is_refused(w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockrelay_worker.execution.ranks.group.VERSION", "0.1")
    with pytest.raises(UsageError, match=r"rank 1: this process is of another release .* than its worker \(0\.1\)"):
        SharedExecutors(w8a8, ranks=2, threads=1).load(w8a8, 1, 2, pages=4)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two nodes need two processors")
def test_each_rank_has_the_processors_of_its_own_node(
    w8a8: BlockFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    halves = [set(sorted(before)[::2]), set(sorted(before)[1::2])]
    for number, cpus in enumerate(halves):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(",".join(map(str, cpus)))
    for place in ("cpu.shared_loading", "ranks.group"):
        monkeypatch.setattr(f"blockrelay_worker.execution.{place}.bind", partial(bind, root=tmp_path))
    try:
        loaded = SharedExecutors(w8a8, ranks=2, threads=1).load(w8a8, 1, w8a8.model.blocks, pages=4)
        try:
            assert [os.sched_getaffinity(pid) for pid in (0, pid_of_rank(loaded))] == halves
        finally:
            loaded.close()
    finally:
        os.sched_setaffinity(0, before)


def test_a_rank_without_memory_and_a_process_that_cannot_start_are_told_as_such(
    w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker gives its cell a smaller precision where memory lacks, so it must know."""
    executors = SharedExecutors(w8a8, ranks=2, threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(SharedCommunicator, "receive", lambda *_: {"refused": "not enough memory", "type": "MemoryError"})
        with pytest.raises(MemoryError, match="rank 1: not enough memory"):
            executors.load(w8a8, 1, 2, pages=4)
    monkeypatch.setattr("blockrelay_worker.execution.ranks.group.sys.executable", "/no/python")
    with pytest.raises(ExecutionError, match=r"the system starts no process for a rank: .*No such file"):
        executors.load(w8a8, 1, 2, pages=4)


def test_a_load_can_be_abandoned(w8a8: BlockFolder) -> None:
    """A thread that loads a stage gets DeviceLost, as when its worker is told to end meanwhile."""
    executors = SharedExecutors(w8a8, ranks=2, threads=1)

    def load() -> None:
        with pytest.raises(DeviceLost):
            executors.load(w8a8, 1, w8a8.model.blocks, pages=4)

    thread = threading.Thread(target=load)
    thread.start()
    while thread.is_alive():
        executors.abandon()
        thread.join(0.01)


def test_what_ranks_cannot_share_is_refused(
    w8a8: BlockFolder, fp32: BlockFolder, mixed: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (fp32, mixed):
        with pytest.raises(UsageError, match="tensor_parallel is for w8a8 and w4a8"):
            SharedExecutors(folder, ranks=2, threads=1)
        with pytest.raises(UsageError, match="tensor_parallel is for w8a8 and w4a8"):
            SharedExecutors(w8a8, ranks=2, threads=1, others=[folder])
    monkeypatch.setattr("blockrelay_worker.execution.cpu.shared_loading.cores", lambda: 2)
    with pytest.raises(UsageError, match="tensor_parallel 3: there are 2 cores for ranks"):
        SharedExecutors(w8a8, ranks=3, threads=1)
    monkeypatch.setattr("blockrelay_worker.execution.cpu.shared_loading.load_kernels", lambda *_: ReferenceKernels())
    with pytest.raises(UsageError, match="needs our compiled kernels"):
        SharedExecutors(w8a8, ranks=2, threads=1)
