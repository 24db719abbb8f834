"""Sessions of ONNX blocks that come and go: which are there, what is counted, and how much memory they take."""

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, UsageError
from blockrelay.host.memory import anonymous_bytes
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.loader import gpu_of
from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock
from blockrelay_worker.execution.onnx.as_is.loading import AsIsExecutors
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.as_is.warm_blocks import ALL, CLEAN_UP_EVERY, TRIES, WarmBlocks, WarmLimits
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
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
    assert counts.clean_ups == counts.evicted // CLEAN_UP_EVERY and counts.load_seconds > 0
    assert anonymous_bytes() - before < 150 * MIB and not counts.grown
    stage.close()
    assert found == greedy(stage_of(folder, ALL), STEPS)


def test_each_is_made_once_where_all_have_room(folder: BlockFolder) -> None:
    stage = stage_of(folder, WarmLimits(sessions=BLOCKS, bytes=1 << 30))
    greedy(stage, 5)
    counts = stage.blocks.counts
    assert (counts.made, counts.evicted, counts.clean_ups) == (BLOCKS, 0, 0)


class Opened:
    """What `WarmBlocks` opens: which, in order. `fails` says how often the next one does."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.fails = 0

    def __call__(self, index: int) -> AsIsBlock:
        self.asked.append(index)
        if self.fails:
            self.fails -= 1
            raise BlockFolderError(f"block_{index} is not to be had")
        return AsIsBlock.__new__(AsIsBlock)


def test_the_least_recently_used_goes_first_by_sessions_and_by_bytes() -> None:
    for limits in (WarmLimits(sessions=3), WarmLimits(bytes=30), WarmLimits(sessions=9, bytes=39)):
        made = Opened()
        blocks = WarmBlocks(made, [10] * 5, limits=limits)
        for index in (1, 2, 3, 1, 4, 1, 2):
            blocks.get(index)
        assert made.asked == [1, 2, 3, 4, 2], "4 took the room of 2, and 2 that of 3"
        assert (blocks.counts.made, blocks.counts.evicted, blocks.bytes) == (5, 2, 30)


def test_one_that_is_larger_than_the_room_is_there_alone() -> None:
    blocks = WarmBlocks(Opened(), [10, 50, 10], limits=WarmLimits(bytes=25))
    for index, held in ((1, 10), (3, 20), (2, 50), (1, 10)):
        blocks.get(index)
        assert blocks.bytes == held


def test_what_cannot_be_made_is_tried_again() -> None:
    made = Opened()
    blocks = WarmBlocks(made, [10] * 3, limits=WarmLimits(sessions=1))
    made.fails = TRIES - 1
    blocks.get(1)
    assert made.asked == [1] * TRIES and blocks.counts.made == 1
    made.fails = TRIES
    with pytest.raises(BlockFolderError, match="block_2 is not to be had"):
        blocks.get(2)
    assert blocks.get(2) is not None, "the next time is another one"


def test_the_next_one_is_made_in_the_background_where_both_have_room() -> None:
    made = Opened()
    blocks = WarmBlocks(made, [10] * 3, limits=WarmLimits(sessions=2), beside=True)
    blocks.get(1)
    blocks.prepare(2, running=1)
    blocks.get(2)
    blocks.prepare(4, running=2)  # there is none
    assert made.asked == [1, 2]
    alone = WarmBlocks(made, [10] * 3, limits=WarmLimits(sessions=1), beside=True)
    alone.get(1)
    alone.prepare(2, running=1)
    assert made.asked == [1, 2, 1]
    for one in (blocks, alone):
        one.close()


def test_one_that_was_prepared_and_fails_says_so_when_it_is_needed() -> None:
    made = Opened()
    blocks = WarmBlocks(made, [10] * 3, limits=WarmLimits(sessions=3), beside=True)
    blocks.get(1)
    made.fails = TRIES
    blocks.prepare(2, running=1)
    with pytest.raises(BlockFolderError, match="block_2 is not to be had"):
        blocks.get(2)
    blocks.close()


@pytest.mark.parametrize(
    ("settings", "warm"),
    [
        ({}, (None, None)),
        ({"sequential": True}, (2, None)),
        ({"sequential": True, "max_warm_sessions": 5}, (5, None)),
        ({"sequential": True, "warm_session_bytes": 10**9}, (None, 10**9)),
    ],
)
def test_settings_say_how_many(
    folder: BlockFolder, settings: dict[str, object], warm: tuple[int | None, int | None]
) -> None:
    gpu = gpu_of(WorkerSettings.model_validate(settings), folder)
    assert gpu is not None and gpu.warm == warm


@pytest.mark.parametrize(
    ("settings", "of", "said"),
    [
        ({"max_warm_sessions": 5}, "folder", "are for sequential workers"),
        ({"sequential": True, "gpu": "cpu"}, "w8a8", "sequential is for ONNX blocks as they are"),
    ],
)
def test_limits_that_mean_nothing_are_refused(
    folder: BlockFolder, w8a8: BlockFolder, settings: dict[str, object], of: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        gpu_of(WorkerSettings.model_validate(settings), folder if of == "folder" else w8a8)


def test_what_is_held_at_once_is_what_the_device_needs() -> None:
    sizes = [40, 10, 10, 30]
    cases: list[tuple[WarmLimits, int]] = [
        (ALL, 90),
        (WarmLimits(sessions=2), 70),
        (WarmLimits(bytes=50), 50),
        (WarmLimits(bytes=20), 40),
    ]
    for limits, held in cases:
        assert sum(limits.held(sizes)) == held
