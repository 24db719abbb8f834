"""An import of ONNX files replaces the files in the same model: both continue from the same KV pages."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import BlockFolderError, UsageError
from blockrelay.onnx_blocks.blocks_file import why_no_stand_in
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.imported import ImportedExecutors
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.loader import executors_for, gpu_of
from blockrelay_worker.execution.onnx.as_is.answers import TOLERANCES
from blockrelay_worker.execution.onnx.as_is.loading import AsIsExecutors
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.offline.onnx_blocks.splitting.split import run as split
from tests.support.models.genai_decoder import genai_decoder
from tests.support.models.greedy import in_one_batch
from tests.support.models.imported import imported
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.models.whole_decoders import SMALL, optimum_decoder, saved

pytestmark = pytest.mark.onnx_blocks

MODEL = ReferenceModel(layers=3)
PROMPTS, TOKENS = 10, 40
#: Of a row's length: what rounding rows to 8 bits does to logits of the small model, twice what was measured.
ROUNDED_ROWS = 0.12
#: How far the best logit is above the second where tokens must be equal.
CLEAR = 0.1


def _float16(out: Path) -> Path:
    return write_reference_blocks(out, MODEL)


def _float32(out: Path) -> Path:
    path = saved(optimum_decoder(SMALL, float32=True), out.parent / "whole" / "model.onnx", external=True)
    assert split([str(path), str(out)]) == 0
    return out


@dataclass(frozen=True, slots=True)
class Both:
    """The folder that is served, the stage that runs its files, and the one that runs the import of them."""

    folder: BlockFolder
    imported: Path
    files: AsIsStage
    stand_in: StageExecutor


@pytest.fixture(scope="module", params=[_float16, _float32], ids=["float16", "float32"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    write: Callable[[Path], Path] = request.param
    root = tmp_path_factory.mktemp("both")
    blocks = write(root / "blocks")
    folder, out = opened(blocks, root / "cache"), root / "imported"
    imported(blocks, out)
    files, _ = AsIsExecutors(CpuProvider()).loaded(folder, 1, folder.model.blocks, pages=80)
    stand_in = ImportedExecutors(1, folder, out).load(folder, 1, folder.model.blocks, pages=80)
    yield Both(folder, out, files, stand_in)
    files.close()
    stand_in.close()


def logits_behind(stage: Executor, tokens: list[int], past: int, pages: tuple[int, ...]) -> NDArray[np.float32]:
    segment = Segment(rows=len(tokens), first_position=past, pages=pages)
    output = stage.run(Batch(segments=[segment], tokens=np.array(tokens, np.int32), wanted=[len(tokens) - 1]))
    assert output.logits is not None and not output.not_finite
    return output.logits[0].copy()


@pytest.mark.parametrize("back", [False, True], ids=["to the stand-in", "and from it"])
def test_it_goes_on_with_the_pages_of_the_other(both: Both, back: bool) -> None:
    """Ten answers, handed over behind each of their tokens: logits are near, and tokens equal where they are clear."""
    first, then = (both.stand_in, both.files) if back else (both.files, both.stand_in)
    tolerance = TOLERANCES["float16" if both.folder.manifest.precision == "fp16" else "float32"]
    random = np.random.default_rng(7)
    prompts = [random.integers(0, both.folder.model.vocab_size, size).tolist() for size in range(3, 3 + 3 * PROMPTS, 3)]
    pages = [tuple(range(8 * n, 8 * n + 8)) for n in range(PROMPTS)]
    answers = in_one_batch(first, prompts, pages, TOKENS)
    clear = 0
    for prompt, answer, own in zip(prompts, answers, pages, strict=True):
        text = [*prompt, *answer]
        for past in range(len(prompt), len(text) - 1, 7):
            then.import_pages(own, first.export_pages(own))
            found, right = (logits_behind(stage, text[past : past + 1], past, own) for stage in (then, first))
            assert np.linalg.norm(found - right) <= tolerance * np.linalg.norm(right)
            second, best = np.sort(right)[-2:]
            if best - second > CLEAR:
                clear += 1
                assert found.argmax() == right.argmax()
    assert clear > PROMPTS


def test_four_bits_stay_four_bits(tmp_path: Path) -> None:
    """Rows are rounded in the import and not in the blocks; a context beyond the tables of these is named."""
    path = saved(genai_decoder(SMALL, int4=True, float16=True), tmp_path / "whole" / "model.onnx", external=True)
    assert split([str(path), str(tmp_path / "blocks")]) == 0
    made = imported(tmp_path / "blocks", tmp_path / "imported").folder
    rows = made.model.max_position
    folder = opened(tmp_path / "blocks", tmp_path / "cache", "--max-position", str(rows))
    files, _ = AsIsExecutors(CpuProvider()).loaded(folder, 1, folder.model.blocks, pages=8)
    stand_in = ImportedExecutors(1, folder, made.root).load(folder, 1, folder.model.blocks, pages=8)
    assert made.manifest.precision == "w4a8" and not stand_in.capabilities.exact
    text = np.random.default_rng(1).integers(0, folder.model.vocab_size, 60).tolist()
    right, found = (logits_behind(stage, text, 0, tuple(range(4))) for stage in (files, stand_in))
    assert 0 < np.linalg.norm(found - right) <= ROUNDED_ROWS * np.linalg.norm(right)
    files.close()
    stand_in.close()
    with pytest.raises(UsageError, match=f"--max-position {rows}"):
        ImportedExecutors(1, opened(tmp_path / "blocks", tmp_path / "longer"), made.root)


def test_it_says_what_it_is(both: Both) -> None:
    """Not exact, since the files are not; of numerics of its own; per block as the files are counted."""
    able, blocks = both.stand_in.capabilities, both.folder.model.blocks
    assert not able.exact and able.numerics_id != both.files.capabilities.numerics_id
    executors = executors_for(both.folder, threads=1, imported=both.imported)
    assert able.numerics_id == executors.numerics_id(both.folder.manifest)
    assert able.numerics_id.startswith(f"{both.folder.manifest.precision}-imported-")
    assert executors.nondeterministic
    assert both.stand_in.details["blocks"] == "imported" and both.files.details["blocks"] == "as they are"
    assert both.stand_in.layout == both.files.layout
    output = both.stand_in.run(
        Batch(segments=[Segment(rows=1, first_position=0, pages=(0,))], tokens=np.array([3], np.int32), wanted=[0])
    )
    assert list(output.seconds) == [f"block_{index}" for index in range(1, blocks + 1)]


def test_of_other_blocks_it_is_refused(both: Both, tmp_path: Path) -> None:
    """Though they have the same shape."""
    others = opened(write_reference_blocks(tmp_path / "blocks", replace(MODEL, seed=2)), tmp_path / "cache")
    with pytest.raises(UsageError, match="is no import of these blocks"):
        ImportedExecutors(1, others, both.imported)
    with pytest.raises(BlockFolderError, match="no such block folder"):
        ImportedExecutors(1, both.folder, tmp_path / "nowhere")
    with pytest.raises(BlockFolderError, match="serves all blocks as one stage"):
        ImportedExecutors(1, both.folder, both.imported).load(both.folder, 1, 1, pages=2)


def _other_model(manifest: Manifest, **fields: int) -> Manifest:
    return replace(manifest, model=replace(manifest.model, **fields))


def test_other_pages_and_shorter_contexts_are_refused(both: Both) -> None:
    served = both.folder.manifest
    made = executors_for(both.folder, threads=1, imported=both.imported)
    assert isinstance(made, ImportedExecutors)
    right = made.imported.manifest
    assert why_no_stand_in(served, right) == ""
    rounded = replace(right, precisions=("fp32" if served.precision == "fp16" else "fp16",) * right.model.blocks)
    for wrong, said in (
        (_other_model(right, layers=right.model.layers + 1), "blocks, and there are"),
        (_other_model(right, kv_heads=1), "keeps keys and values differently"),
        (rounded, "keeps keys and values differently"),
        (_other_model(right, max_position=8), "has 8 positions, as their tables have"),
    ):
        assert said in why_no_stand_in(served, wrong)


def test_a_folder_that_changes_under_a_worker_is_refused(both: Both, tmp_path: Path) -> None:
    copy = tmp_path / "imported"
    shutil.copytree(both.imported, copy)
    executors = ImportedExecutors(1, both.folder, copy)
    (copy / "blocks" / "block_2.bin").write_bytes(b"x")
    with pytest.raises(BlockFolderError, match=r"block_2\.bin: altered.* imports them again"):
        executors.load(both.folder, 1, both.folder.model.blocks, pages=2)


def test_it_is_for_cpus_and_for_models_that_fit(both: Both) -> None:
    """A worker on a GPU may have the setting, as an environment of all of them has it."""
    assert gpu_of(WorkerSettings(imported_model=both.imported), both.folder) is None
    on_gpu = gpu_of(WorkerSettings(imported_model=both.imported, gpu="webgpu:0"), both.folder)
    assert on_gpu is not None and on_gpu.device == "webgpu:0"
    with pytest.raises(UsageError, match="imported_model is for CPU workers"):
        gpu_of(WorkerSettings(imported_model=both.imported, sequential=True), both.folder)


def test_an_import_in_another_precision_is_another_model(both: Both, tmp_path: Path) -> None:
    assert both.folder.onnx_root is not None
    rounded = imported(both.folder.onnx_root, tmp_path / "w8a8", precision="w8a8").folder
    assert rounded.manifest.imported_from is None
    with pytest.raises(UsageError, match="in their own precision"):
        ImportedExecutors(1, both.folder, rounded.root)
