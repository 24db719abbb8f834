"""ONNX blocks that others made give the same in any number of stages: consecutive blocks each, tensors handed on by
name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, ExecutionError
from blockrelay_worker.execution.batch import NamedTensors
from blockrelay_worker.execution.onnx.as_is.loading import AsIsExecutors
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.as_is.warm_blocks import ALL, WarmLimits
from blockrelay_worker.execution.onnx.known_answers import row_error
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.offline.onnx_blocks.splitting.split import run as split
from tests.support.models.altered_blocks import altered, copied, counting_sequences, spoiled_for, unshaped
from tests.support.models.cut_onnx_blocks import Row, batch_of, cut, run
from tests.support.models.genai_decoder import genai_decoder
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.models.whole_decoders import dynamo_decoder, optimum_decoder, saved

pytestmark = pytest.mark.onnx_blocks

#: Four layers and the head.
SHAPE = ReferenceModel(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=128, vocabulary=256)
BLOCKS = SHAPE.layers + 1
CUTS = ((5,), (2, 5), (1, 2, 3, 4, 5), (4, 5))
MODELS: dict[str, Callable[[], ModelProto]] = {
    "optimum": lambda: optimum_decoder(SHAPE, float32=True),
    "dynamo": lambda: dynamo_decoder(SHAPE),
    "genai": lambda: genai_decoder(SHAPE),
}


@dataclass(frozen=True, slots=True)
class Served:
    folder: BlockFolder
    tolerance: float


@pytest.fixture(
    scope="module",
    params=[
        "float16",
        "counting",
        "genai",
        *(pytest.param(name, marks=pytest.mark.onnx_blocks) for name in ("optimum", "dynamo")),
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    root = tmp_path_factory.mktemp("parts")
    if request.param == "float16":
        return Served(opened(write_reference_blocks(root / "blocks", SHAPE), root / "cache"), 2e-2)
    if request.param == "counting":
        blocks = counting_sequences(write_reference_blocks(root / "whole", SHAPE), root / "blocks")
        return Served(opened(blocks, root / "cache"), 2e-2)
    path = saved(MODELS[request.param](), root / "whole" / "model.onnx", external=True)
    assert split([str(path), str(root / "blocks")]) == 0
    return Served(opened(root / "blocks", root / "cache"), 1e-5)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    root = tmp_path_factory.mktemp("narrow")
    return opened(write_reference_blocks(root / "blocks", SHAPE), root / "cache")


def texts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(0, SHAPE.vocabulary, size).tolist() for size in (5, 5, 20, 3, 5)]


def pages_of(number: int) -> range:
    return range(4 * number, 4 * number + 4)


def told(stages: Sequence[AsIsStage]) -> list[NDArray[np.float32]]:
    """Logits of five requests: prompts in one batch, one of them in chunks beside the decode steps of others, and then
    steps of all five."""
    found: list[NDArray[np.float32]] = []
    prompts, done = texts(), [0] * 5
    for parts in ([5, 5, 7, 3, 5], [1, 1, 13, 1, 1], [1, 0, 1, 2, 1], [1, 1, 1, 1, 1]):
        rows: list[Row] = []
        for number, count in enumerate(parts):
            if count:
                text = [*prompts[number], *range(10, 20)]
                rows.append((text[done[number] : done[number] + count], done[number], pages_of(number)))
                done[number] += count
        found.append(run(stages, rows, all_wanted=True))
    return found


def close(stages: Sequence[AsIsStage]) -> None:
    for stage in stages:
        stage.close()


def test_any_cut_gives_the_logits_of_one_stage(served: Served) -> None:
    executors, known = AsIsExecutors(CpuProvider()), list[NDArray[np.float32]]()
    for ends in CUTS:
        stages = cut(executors, served.folder, ends)
        assert sum(stage.layout.layers for stage in stages) == SHAPE.layers
        found = told(stages)
        known = known or found
        for one, right in zip(found, known, strict=True):
            assert row_error(one, right) <= served.tolerance
        close(stages)


def test_who_runs_together_may_differ_from_stage_to_stage(served: Served) -> None:
    """Each request alone before, all together behind, and the other way round: prompts and steps of equal length."""
    stages = cut(AsIsExecutors(CpuProvider()), served.folder, (1, 3, 5))
    prompts = [text for text in texts() if len(text) == 5]
    for tokens, past in ((5, 0), (1, 5), (3, 6)):
        rows: list[Row] = [(text[:tokens], past, pages_of(number)) for number, text in enumerate(prompts)]
        known = run(stages, rows)
        for together in ((False, True, False), (True, False, True)):
            tensors: list[Sequence[NamedTensors]] = [()] * len(rows)
            found: NDArray[np.float32] | None = None
            for stage, all_at_once in zip(stages, together, strict=True):
                parts = [slice(0, len(rows))] if all_at_once else [slice(at, at + 1) for at in range(len(rows))]
                behind: list[Sequence[NamedTensors]] = []
                logits: list[NDArray[np.float32]] = []
                for part in parts:
                    given = () if stage.takes_tokens else tensors[part]
                    output = stage.run(batch_of(rows[part], given))
                    behind += output.tensors or ()
                    logits += [] if output.logits is None else list(output.logits)
                tensors, found = behind, np.array(logits)
            assert found is not None
            assert row_error(found, known) <= served.tolerance
    close(stages)


def test_pages_of_a_part_go_on_elsewhere(narrow: BlockFolder) -> None:
    """Bit by bit, in a stage of the same blocks of another process's executors."""
    here, there = (cut(AsIsExecutors(CpuProvider()), narrow, (2, 5)) for _ in range(2))
    text = texts()[2]
    run(here, [(text, 0, (9, 4))])
    for one, other in zip(here, there, strict=True):
        other.import_pages([3, 8], one.export_pages([9, 4]))
        assert [len(page) for page in other.export_pages([3])] == [other.layout.layers]
        for theirs, ours in zip(other.export_pages([3, 8]), one.export_pages([9, 4]), strict=True):
            assert all(
                np.array_equal(a, b) for pair in zip(theirs, ours, strict=True) for a, b in zip(*pair, strict=True)
            )
    assert np.array_equal(run(there, [([7], 20, (3, 8))]), run(here, [([7], 20, (9, 4))]))
    close([*here, *there])


def test_a_head_alone_keeps_nothing(narrow: BlockFolder) -> None:
    executors = AsIsExecutors(CpuProvider())
    head, _ = executors.loaded(narrow, 5, 5, pages=9)
    assert head.layout.bytes_per_page == head.pool_bytes == 0 and head.gives_logits and not head.takes_tokens
    assert executors.memory(narrow).block_layers == (1, 1, 1, 1, 0)
    hidden = np.ones((1, 3, SHAPE.hidden), np.float16)
    given = [[NamedTensors(rows=3, arrays={"/model/layers.3/Add_1_output_0": hidden})]]
    batch = batch_of([([1, 2, 3], 40, ())], given)
    assert head.run(batch).logits is not None and head.first_not_finite(batch) is None
    head.import_pages([1], head.export_pages([2]))
    head.close()


HIDDEN = "/model/layers.1/Add_1_output_0"


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda arrays: {k: v for k, v in arrays.items() if k != HIDDEN}, "has not come from the stage before"),
        (
            lambda arrays: arrays | {HIDDEN: np.concatenate([arrays[HIDDEN]] * 2)},
            r"came as \(2, 5, 64\): side 0 of one sequence is 1",
        ),
        (
            lambda arrays: arrays | {HIDDEN: arrays[HIDDEN].astype(np.float32)},
            r"came as float32 \(1, 5, 64\), and is float16 of 3 dimensions",
        ),
        (lambda arrays: arrays | {HIDDEN: arrays[HIDDEN][:, :4]}, r"came as \(1, 4, 64\), \(1, 5, 64\) of sequences"),
    ],
)
def test_tensors_that_are_not_what_they_must_be_are_named(
    narrow: BlockFolder,
    alter: Callable[[dict[str, NDArray[np.float16]]], dict[str, NDArray[np.float16]]],
    said: str,
) -> None:
    first, second = cut(AsIsExecutors(CpuProvider()), narrow, (2, 5))
    rows: list[Row] = [(text, 0, pages_of(number)) for number, text in enumerate(texts()[:2])]
    tensors = [list(parts) for parts in first.run(batch_of(rows)).tensors or ()]
    tensors[1] = [NamedTensors(rows=5, arrays=alter(dict(tensors[1][0].arrays)))]
    with pytest.raises(ExecutionError, match=f"block_3: {HIDDEN}: {said}") as failed:
        second.run(batch_of(rows, tensors))
    assert failed.value.block == "block_3"
    with pytest.raises(ExecutionError, match="this stage takes tensors for each of 2 segments, and has 1"):
        second.run(batch_of(rows, tensors[:1]))
    tensors[1] = [NamedTensors(rows=4, arrays={})]
    with pytest.raises(ExecutionError, match=r"segment 1: 5 rows, and tensors of \[4\]"):
        second.run(batch_of(rows, tensors))
    close([first, second])


MARK = 7


@pytest.mark.parametrize("warm", [ALL, WarmLimits(sessions=1)], ids=["warm", "one by one"])
def test_a_block_that_spoils_rows_is_named_in_its_stage(tmp_path: Path, warm: WarmLimits) -> None:
    """Of two requests one is spoiled by block 3, whose stage hands on what it made: it says so at once. The masks of
    minus infinity beside it are none."""
    whole = write_reference_blocks(tmp_path / "whole", ReferenceModel(layers=4))
    folder = opened(spoiled_for(whole, tmp_path / "blocks", MARK), tmp_path / "cache")
    first, second, third = cut(AsIsExecutors(CpuProvider(), warm=warm), folder, (1, 3, 5))
    rows: list[Row] = [([3, 5, 9], 0, pages_of(0)), ([3, MARK, 9], 0, pages_of(1))]
    before = first.run(batch_of(rows))
    output = second.run(batch_of(rows, before.tensors or ()))
    assert (before.not_finite, output.not_finite) == ((), (1,))
    fault = second.first_not_finite(batch_of(rows, before.tensors or ()))
    assert fault is not None and fault.block == "block_3" and list(fault.seconds) == ["block_2", "block_3"]
    assert first.first_not_finite(batch_of(rows)) is None
    assert third.run(batch_of(rows, output.tensors or ())).not_finite == (1,)
    close([first, second, third])


def test_stages_share_one_budget_of_sessions(narrow: BlockFolder) -> None:
    """Five stages of a block each in the room of two: each step makes every session anew, and counts are each stage's
    own."""
    executors = AsIsExecutors(CpuProvider(), warm=WarmLimits(sessions=2))
    known = told(cut(AsIsExecutors(CpuProvider()), narrow, (5,)))
    stages = cut(executors, narrow, (1, 2, 3, 4, 5))
    sizes = executors.memory(narrow).block_bytes
    made = sum(stage.blocks.counts.made for stage in stages)
    steps = told(stages)
    assert sum(stage.blocks.counts.made for stage in stages) - made == pytest.approx(len(steps) * BLOCKS, abs=1)
    assert 0 < sum(stage.weight_bytes for stage in stages) <= sum(sorted(sizes)[-2:])
    assert all(stage.blocks.counts.jobs_failed == 0 and stage.blocks.counts.jobs_ok for stage in stages)
    for one, right in zip(steps, known, strict=True):
        assert row_error(one, right) <= 2e-2
    close(stages)
    assert all(stage.weight_bytes == 0 for stage in stages)


def test_a_part_that_cannot_be_cut_off_is_refused_before_anything_is_loaded(
    narrow: BlockFolder, tmp_path: Path
) -> None:
    assert narrow.onnx_root is not None
    folder = opened(
        copied(
            narrow.onnx_root, tmp_path / "blocks", altered("block_2.onnx", lambda model: unshaped(model, HIDDEN, 3))
        ),
        tmp_path / "cache",
    )
    executors = AsIsExecutors(CpuProvider())
    with pytest.raises(BlockFolderError, match=f"block_2.onnx: {HIDDEN}: is of unknown dimensions"):
        executors.loaded(folder, 3, 5, pages=9)
    close(cut(executors, folder, (1, 5)))
