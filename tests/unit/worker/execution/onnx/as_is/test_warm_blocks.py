"""Sessions of ONNX blocks that come and go: which are there, what is counted, and how much memory they take."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import ExecutionError, UsageError
from blockrelay.host.memory import anonymous_bytes
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.device_memory import held_at_once
from blockrelay_worker.execution.loader import gpu_of
from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock, Value
from blockrelay_worker.execution.onnx.as_is.loading import AsIsExecutors, room_for_sessions
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.as_is.warm_blocks import ALL, WarmBlocks, WarmLimits
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Steps
from blockrelay_worker.policy import SESSIONS_A_CLEAN_UP
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks

pytestmark = pytest.mark.onnx_blocks

BLOCKS, STEPS = 10, 5
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    root = tmp_path_factory.mktemp("onnx")
    return opened(write_reference_blocks(root / "blocks", ReferenceModel(layers=BLOCKS - 1)), root / "cache")


class OneThing(CpuProvider):
    """A device that makes no session while another one runs."""

    loads_beside = False


def stage_of(folder: BlockFolder, warm: WarmLimits, provider: type[CpuProvider] = CpuProvider) -> AsIsStage:
    return AsIsExecutors(provider(), warm=warm).loaded(folder, 1, folder.model.blocks, pages=20)[0]


def greedy(stage: AsIsStage, steps: int) -> list[int]:
    found = [7]
    for at in range(steps):
        step = Segment(rows=1, first_position=at, pages=tuple(range(8)))
        output = stage.run(Batch(segments=[step], tokens=np.array(found[-1:], np.int32), wanted=[0]))
        assert output.logits is not None
        found.append(int(output.logits[0].argmax()))
    return found


@pytest.mark.parametrize("provider", [CpuProvider, OneThing])
def test_room_for_two_of_ten(folder: BlockFolder, provider: type[CpuProvider]) -> None:
    """Each step makes each block anew. The tokens are those of blocks that stay."""
    stage = stage_of(folder, WarmLimits(sessions=2), provider)
    counts = stage.blocks.counts
    before, made = anonymous_bytes(), counts.made
    found = greedy(stage, STEPS)
    assert counts.made - made == pytest.approx(STEPS * BLOCKS, abs=1), "the one that comes may be under way"
    assert counts.evicted == pytest.approx(counts.made - 2, abs=1)
    assert counts.clean_ups == counts.evicted // SESSIONS_A_CLEAN_UP and counts.load_seconds > 0
    assert anonymous_bytes() - before < 150 * MIB and not counts.grown
    stage.close()
    assert found == greedy(stage_of(folder, ALL), STEPS)


def test_a_file_that_is_altered_while_it_is_served_makes_no_session(tmp_path: Path) -> None:
    """Blocks that are not warm get new sessions in each step, of the files that were checked and of no others."""
    own = opened(write_reference_blocks(tmp_path / "blocks", ReferenceModel(layers=3)), tmp_path / "cache")
    stage = stage_of(own, WarmLimits(sessions=1), OneThing)
    assert greedy(stage, 2)
    block = tmp_path / "blocks" / "block_3.onnx"
    block.write_bytes(block.read_bytes())
    with pytest.raises(ExecutionError, match=r"block_3\.onnx: altered while it is served: start again") as raised:
        greedy(stage, 1)
    assert raised.value.block == "block_3"
    stage.close()


class Flaky(CpuProvider):
    """A device on which every seventh session is not made, and every eleventh block of a step fails behind its load."""

    loads_beside = False
    sessions = 0

    def mixed_session(self, graph: bytes, weights: Path, steps: Steps = "many") -> ort.InferenceSession:
        self.sessions += 1
        if self.sessions % 7 == 0:
            raise RuntimeError("moon phase")
        return super().mixed_session(graph, weights, steps)


def test_failures_that_pass_change_no_token(folder: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, runs, run = stage_of(folder, WarmLimits(sessions=2), Flaky), [0], AsIsBlock.run

    def runs_or_not(self: AsIsBlock, given: Mapping[str, Value], pools: Mapping[str, Any]) -> dict[str, Value]:
        runs[0] += 1
        if runs[0] % 11 == 0:
            raise RuntimeError("moon phase")
        return run(self, given, pools)

    before = stage.blocks.counts.retries
    with monkeypatch.context() as patched:
        patched.setattr(AsIsBlock, "run", runs_or_not)
        found = greedy(stage, STEPS)
    counts = stage.blocks.counts
    assert counts.retries - before >= runs[0] // 11 + STEPS and counts.jobs_failed == 0
    stage.close()
    assert found == greedy(stage_of(folder, ALL), STEPS)


def test_each_is_made_once_where_all_have_room(folder: BlockFolder) -> None:
    stage = stage_of(folder, WarmLimits(sessions=BLOCKS, bytes=1 << 30))
    greedy(stage, 5)
    counts = stage.blocks.counts
    assert (counts.made, counts.evicted, counts.clean_ups) == (BLOCKS, 0, 0)


class Opened:
    """What `WarmBlocks` opens: which, in order. The next one fails by each of the texts that are `said`; so does
    running one, by those that `run` takes."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.ran: list[AsIsBlock] = []
        self.said: list[str] = []

    def __call__(self, index: int) -> AsIsBlock:
        self.asked.append(index)
        if self.said:
            raise RuntimeError(self.said.pop(0))
        return AsIsBlock.__new__(AsIsBlock)

    def run(self, *said: str) -> Callable[[AsIsBlock], None]:
        left = list(said)

        def run(block: AsIsBlock) -> None:
            self.ran.append(block)
            if left:
                raise RuntimeError(left.pop(0))

        return run


def test_the_least_recently_used_goes_first_by_sessions_and_by_bytes() -> None:
    for limits in (WarmLimits(sessions=3), WarmLimits(bytes=30), WarmLimits(sessions=9, bytes=39)):
        made = Opened()
        blocks = WarmBlocks(made, [10] * 5, limits=limits).part(1, 5)
        for index in (1, 2, 3, 1, 4, 1, 2):
            blocks.get(index)
        assert made.asked == [1, 2, 3, 4, 2], "4 took the room of 2, and 2 that of 3"
        assert (blocks.counts.made, blocks.counts.evicted, blocks.bytes) == (5, 2, 30)


def test_one_that_is_larger_than_the_room_is_there_alone() -> None:
    blocks = WarmBlocks(Opened(), [10, 50, 10], limits=WarmLimits(bytes=25)).part(1, 3)
    for index, held in ((1, 10), (3, 20), (2, 50), (1, 10)):
        blocks.get(index)
        assert blocks.bytes == held


def test_what_cannot_be_made_is_tried_again() -> None:
    made = Opened()
    blocks = WarmBlocks(made, [10] * 3, limits=WarmLimits(sessions=1)).part(1, 3)
    made.said = ["moon phase"] * 2
    blocks.get(1)
    assert made.asked == [1] * 3 and (blocks.counts.made, blocks.counts.retries) == (1, 2)
    made.said = ["moon phase", "moon phase", "still"]
    with pytest.raises(RuntimeError, match="still"):
        blocks.get(2)
    assert blocks.get(2) is not None, "the next time is another one"


@pytest.mark.parametrize(
    ("making", "running", "sessions", "retries", "ends_by"),
    [
        (1, 1, 2, 2, ""),
        (2, 0, 1, 2, ""),
        (0, 2, 3, 2, ""),
        (1, 2, 2, 2, "runs not"),
        (3, 0, 0, 2, "makes not"),
    ],
)
def test_tries_are_those_of_making_and_running_together(
    making: int, running: int, sessions: int, retries: int, ends_by: str
) -> None:
    """A try that runs behind one that ran and failed has a session of its own."""
    made = Opened()
    blocks = WarmBlocks(made, [10] * 3, limits=WarmLimits(sessions=1)).part(1, 3)
    made.said = ["makes not"] * making
    if ends_by:
        with pytest.raises(RuntimeError, match=ends_by):
            blocks.work(1, made.run(*["runs not"] * running))
    else:
        blocks.work(1, made.run(*["runs not"] * running))
    counts = blocks.counts
    assert (counts.made, counts.retries) == (sessions, retries)
    assert (counts.jobs_ok, counts.jobs_failed) == (not ends_by, bool(ends_by))
    assert len(set(map(id, made.ran))) == len(made.ran)


@pytest.mark.parametrize("said", ["device lost", "INVALID_ARGUMENT", "NOT_IMPLEMENTED", "CUDA failure 700: x"])
def test_what_does_not_pass_by_repeating_is_not_repeated(said: str) -> None:
    made = Opened()
    blocks = WarmBlocks(made, [10] * 3, limits=WarmLimits(sessions=3)).part(1, 3)
    blocks.get(2)
    made.said = [said]
    with pytest.raises(RuntimeError, match=said):
        blocks.work(1, made.run())
    with pytest.raises(RuntimeError, match=said):
        blocks.work(2, made.run(said))
    assert made.asked == [2, 1] and blocks.counts.retries == 0 and blocks.counts.jobs_failed == 2


def test_a_session_without_room_takes_that_of_others_once() -> None:
    """Of five that were to be warm there are two from then on; one alone that has no room is not tried again."""
    made = Opened()
    blocks = WarmBlocks(made, [10] * 4, limits=WarmLimits(sessions=5)).part(1, 4)
    blocks.get(1)
    blocks.get(2)
    made.said = ["Failed to allocate memory for requested buffer of size 10"]
    blocks.get(3)
    assert blocks.bytes == 10 and blocks.counts.evicted == 2
    for index in (1, 2):
        blocks.get(index)
    assert blocks.bytes == 20
    made.said = ["Failed to allocate memory for requested buffer of size 10"] * 2
    with pytest.raises(RuntimeError, match="Failed to allocate"):
        blocks.get(4)
    assert made.asked == [1, 2, 3, 3, 1, 2, 4, 4] and blocks.counts.retries == 0


def test_the_next_one_is_made_in_the_background_where_both_have_room() -> None:
    made = Opened()
    blocks, alone = (
        WarmBlocks(made, [10] * 3, limits=WarmLimits(sessions=sessions), beside=True).part(1, 3) for sessions in (2, 1)
    )
    blocks.work(1, made.run())
    blocks.get(2)
    assert made.asked == [1, 2]
    alone.work(1, made.run())
    for one in (blocks, alone):
        one.close()
    assert made.asked == [1, 2, 1]


def test_the_next_one_is_made_within_a_stage_alone() -> None:
    """Other stages of the device may be due before the next block behind this one is, and would need its room."""
    made = Opened()
    blocks = WarmBlocks(made, [10] * 4, limits=WarmLimits(sessions=2), beside=True)
    first, second = blocks.part(1, 2), blocks.part(4, 4)
    for _ in range(3):
        for part, index in ((first, 1), (first, 2), (second, 4)):
            part.work(index, made.run())
    assert first.counts.made + second.counts.made == 9 == len(made.asked), "each job has its session made once"
    first.close()
    second.close()


def test_stages_share_what_is_warm() -> None:
    """Stages of blocks 1, 3 and 5; each counts what it had made, and takes its own with it when it is closed."""
    made = Opened()
    blocks = WarmBlocks(made, [10] * 6, limits=WarmLimits(sessions=3), beside=True)
    first, third, fifth = (blocks.part(index, index) for index in (1, 3, 5))
    first.work(1, made.run())
    third.work(3, made.run())
    fifth.work(5, made.run())
    assert made.asked == [1, 3, 5] and [one.counts.made for one in (first, third, fifth)] == [1, 1, 1]
    assert [one.counts.jobs_ok for one in (first, third, fifth)] == [1, 1, 1]
    again = blocks.part(3, 5)
    third.close()
    assert again.bytes == 20 and first.bytes == 10, "another stage has it"
    again.close()
    assert fifth.bytes == 10 and blocks.bytes_of(range(1, 7)) == 20
    first.close()
    fifth.close()
    assert blocks.bytes_of(range(1, 7)) == 0


def test_one_that_was_prepared_and_fails_is_tried_again_when_it_is_needed() -> None:
    made = Opened()
    blocks = WarmBlocks(made, [10] * 3, limits=WarmLimits(sessions=3), beside=True).part(1, 3)
    blocks.get(1)
    made.said = ["moon phase"] * 3
    blocks.work(1, made.run())
    with pytest.raises(RuntimeError, match="moon phase"):
        blocks.get(2)
    assert made.asked == [1, 2, 2, 2] and blocks.counts.retries == 2
    blocks.close()


@pytest.mark.parametrize(
    ("settings", "warm"),
    [
        ({}, (None, None, False)),
        ({"sequential": True}, (3, None, True)),
        ({"sequential": True, "gpu": "cpu"}, (5, None, True)),
        ({"sequential": True, "max_warm_sessions": 7}, (7, None, False)),
        ({"sequential": True, "warm_session_bytes": 10**9}, (None, 10**9, False)),
    ],
)
def test_settings_say_how_many(
    folder: BlockFolder, settings: dict[str, object], warm: tuple[int | None, int | None, bool]
) -> None:
    gpu = gpu_of(WorkerSettings.model_validate(settings), folder)
    assert gpu is not None and gpu.warm == warm


@pytest.mark.parametrize(
    ("settings", "of", "said"),
    [
        ({"max_warm_sessions": 5}, "folder", "need sequential: set it"),
        ({"sequential": True, "gpu": "cpu"}, "w8a8", "sequential is for models served as ONNX files"),
    ],
)
def test_limits_that_mean_nothing_are_refused(
    folder: BlockFolder, w8a8: BlockFolder, settings: dict[str, object], of: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        gpu_of(WorkerSettings.model_validate(settings), folder if of == "folder" else w8a8)


class Small(CpuProvider):
    """A device that tells what is free of its memory."""

    def budget_bytes(self) -> int:
        return 70


@pytest.mark.parametrize(
    ("provider", "told", "held"),
    [(Small(), None, 35), (Small(), 200, 100), (Small(), 10, 30), (CpuProvider(), None, 130)],
)
def test_as_many_as_memory_has_room_for_where_nobody_says(provider: CpuProvider, told: int | None, held: int) -> None:
    """Half of it: of blocks of 30 bytes one always has room."""
    assert held_at_once([30] * 4 + [10] * 6, 5, room_for_sessions(provider, told)) == held


def test_sessions_share_the_memory_of_a_step(folder: BlockFolder) -> None:
    """What the largest step has needed is kept once, and not by every block's session: ten times as much."""
    rows, past = 64, 1000
    stage = AsIsExecutors(CpuProvider()).loaded(folder, 1, BLOCKS, pages=rows * 64)[0]
    segments = [
        Segment(rows=1, first_position=past, pages=range(64 * number, 64 * (number + 1))) for number in range(rows)
    ]
    batch = Batch(segments=segments, tokens=np.full(rows, 7, np.int32), wanted=[0])
    before = anonymous_bytes()
    for _ in range(3):
        stage.run(batch)
    assert anonymous_bytes() - before < 400 * MIB
    stage.close()
