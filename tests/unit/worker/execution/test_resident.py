"""Executors of one process share the blocks that are equal: read, packed and verified once, freed with the last one."""

import gc
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.errors import BlockFolderError, KnownAnswerMismatch
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu import loading
from blockrelay_worker.execution.cpu.layers import Block, load_block
from blockrelay_worker.execution.cpu.linears import Computation
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.cpu.stage import StageExecutor

PRECISIONS = ["w8a8", "w4a8", "fp32"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files of the blocks that are read and packed, in their order; no block of a test before is left."""
    gc.collect()
    files: list[str] = []

    def noted(folder: BlockFolder, index: int, by: Computation) -> Block:
        files.append(f"{folder.root.name}/{folder.manifest.block(index).file}")
        return load_block(folder, index, by)

    monkeypatch.setattr("blockrelay_worker.execution.cpu.stage.load_block", noted)
    yield files


@pytest.fixture(params=PRECISIONS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> BlockFolder:
    """A folder of this test alone, whose blocks no executor of another test has."""
    root = request.getfixturevalue(request.param).root
    return another(open_block_folder(root), tmp_path / "folder", rms_norm_eps=1.1e-5)


def another(folder: BlockFolder, root: Path, **model: object) -> BlockFolder:
    """The same files under another path, for a model with these settings; what answers those give is unknown."""
    shutil.copytree(folder.root, root)
    blocks = tuple(replace(block, known_answer=None) for block in folder.manifest.blocks) if model else None
    manifest = replace(folder.manifest, model=replace(folder.model, **model), blocks=blocks or folder.manifest.blocks)  # type: ignore[arg-type]
    (root / "manifest.json").write_bytes(manifest.encode())
    return open_block_folder(root, known_answers=False, blocks=())


def load(folder: BlockFolder, first: int = 1, last: int = 5) -> StageExecutor:
    return CpuExecutors(1).load(folder, first, last, pages=4)


def logits(stage: StageExecutor, rows: int = 20) -> NDArray[np.float32]:
    tokens = np.arange(1, rows + 1, dtype=np.int32)
    segments = [Segment(rows=rows, first_position=0, pages=[2, 3])]
    found = stage.run(Batch(segments=segments, tokens=tokens, wanted=range(rows))).logits
    assert found is not None
    return found.copy()


def test_a_second_executor_has_the_same_blocks_and_reads_none(folder: BlockFolder, loads: list[str]) -> None:
    first = load(folder)
    right = logits(first)
    loads.clear()
    for block in folder.manifest.blocks:
        (folder.root / block.file).unlink()
        (folder.root / block.file).write_bytes(b"another file since it was loaded")
    second = load(folder, 2, 5)
    assert loads == []
    assert all(second.blocks[index] is first.blocks[index] for index in range(2, 6))
    assert first.memory is not second.memory, "pages are not shared"
    whole = load(folder)
    assert logits(whole).tobytes() == right.tobytes()
    # When one of them is closed, the others go on
    first.close()
    assert logits(whole).tobytes() == right.tobytes()


def test_blocks_are_freed_with_the_last_executor_that_has_them(folder: BlockFolder, loads: list[str]) -> None:
    first, second = load(folder), load(folder, 3, 5)
    logits(first)
    kept = {index: weakref.ref(block) for index, block in first.blocks.items()}
    packed = [weakref.ref(linear) for linear in first.linears]
    first.close()
    assert [index for index, block in kept.items() if block() is not None] == [3, 4, 5]
    second.close()
    assert not any(block() for block in (*kept.values(), *packed)), "without a collection of garbage"
    loads.clear()
    load(folder, 5, 5)
    assert loads == ["folder/blocks/block_5.bin"]


def test_folders_with_some_equal_blocks_load_these_once(
    w8a8: BlockFolder, mixed_exact: BlockFolder, loads: list[str], tmp_path: Path
) -> None:
    eight = another(w8a8, tmp_path / "eight", rms_norm_eps=1.2e-5)
    mixed = another(mixed_exact, tmp_path / "mixed", rms_norm_eps=1.2e-5, name="another-name", eos_ids=(1,))
    alone = load(mixed)
    right = logits(alone)
    alone.close()
    first = load(eight)
    loads.clear()
    second = load(mixed)
    assert loads == ["mixed/blocks/block_2.bin", "mixed/blocks/block_3.bin"]
    assert [second.blocks[index] is first.blocks[index] for index in range(1, 6)] == [True, False, False, True, True]
    assert logits(second).tobytes() == right.tobytes()


def test_what_is_computed_otherwise_is_not_shared(w8a8: BlockFolder, tmp_path: Path, loads: list[str]) -> None:
    folder = another(w8a8, tmp_path / "one", rms_norm_eps=1.3e-5)
    executor = load(folder)
    loads.clear()
    for number, other in enumerate([another(folder, tmp_path / "eps", rms_norm_eps=1.4e-5), folder]):
        threads = 1 + number  # the second time, the same folder with other threads
        found = CpuExecutors(threads).load(other, 2, 3, pages=4)
        assert not set(found.blocks.values()) & set(executor.blocks.values())
    assert len(loads) == 4


def test_another_known_answer_is_checked_for_a_block_that_is_loaded(w8a8: BlockFolder) -> None:
    executor = load(w8a8)
    blocks = list(w8a8.manifest.blocks)
    blocks[2] = replace(blocks[2], known_answer="0" * 64)
    other = replace(w8a8, manifest=replace(w8a8.manifest, blocks=tuple(blocks)))
    with pytest.raises(KnownAnswerMismatch, match="block_3"):
        load(other)
    assert executor.blocks[3].linears


def test_blocks_that_are_not_loaded_are_compared_with_the_manifest(folder: BlockFolder) -> None:
    executor = load(folder, 1, 2)
    path = folder.root / folder.manifest.block(4).file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)
    load(folder, 1, 3)
    with pytest.raises(BlockFolderError, match=r"block_4\.bin: altered: its SHA-256"):
        load(folder, 1, 4)
    assert executor.usable


def test_two_threads_that_load_at_once_load_each_block_once(
    w8a8: BlockFolder, tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = another(w8a8, tmp_path / "folder", rms_norm_eps=1.5e-5)
    alone = load(folder)
    right = logits(alone)
    alone.close()
    loads.clear()
    verified: list[int] = []
    check = loading.first_mismatch

    def noted(stage: StageExecutor, blocks: "list[int]") -> str | None:
        verified.extend(blocks)
        return check(stage, blocks)

    monkeypatch.setattr(loading, "first_mismatch", noted)
    begin, ranges = threading.Barrier(4), [(1, 5), (2, 5), (1, 3), (1, 5)]

    def started(blocks: tuple[int, int]) -> StageExecutor:
        begin.wait(30)
        return load(folder, *blocks)

    with ThreadPoolExecutor(4) as pool:
        stages = list(pool.map(started, ranges))
        assert sorted(loads) == [f"folder/blocks/block_{index}.bin" for index in range(1, 6)]
        assert sorted(verified) == [1, 2, 3, 4, 5]
        whole = [stage for stage, blocks in zip(stages, ranges, strict=True) if blocks == (1, 5)]
        assert whole[0].blocks[2] is whole[1].blocks[2] is stages[1].blocks[2]
        # Steps of both at the same time, with batches of all sizes, recorded ones among them
        rows = [*range(1, 21)] * 4
        found: Iterator[list[bytes]] = pool.map(lambda one: [logits(one, n).tobytes() for n in rows], whole)
        expected = [right[:n].tobytes() for n in rows]
        assert list(found) == [expected, expected]


def test_the_bytes_to_load_are_those_of_blocks_that_are_not_loaded(folder: BlockFolder) -> None:
    executors, manifest = CpuExecutors(1), folder.manifest

    def size(*blocks: int) -> int:
        return sum((folder.root / manifest.block(index).file).stat().st_size for index in blocks)

    assert executors.bytes_to_load(manifest, 1, 5) == size(1, 2, 3, 4, 5)
    stage = executors.load(folder, 2, 4, pages=4)
    assert executors.bytes_to_load(manifest, 1, 5) == size(1, 5)
    assert executors.bytes_to_load(manifest, 2, 3) == 0
    stage.close()
    assert executors.bytes_to_load(manifest, 2, 3) == size(2, 3)


@pytest.mark.parametrize("close_first", [False, True])
def test_layers_of_onnx_runtime_are_shared_by_executors_with_buffers_of_their_own(
    fp32: BlockFolder, tmp_path: Path, close_first: bool
) -> None:
    folder = another(fp32, tmp_path / "folder", rms_norm_eps=1.6e-5)
    first, second = load(folder), load(folder)
    right = [logits(first, rows).tobytes() for rows in (1, 20)]
    run: Callable[[StageExecutor], list[bytes]] = lambda stage: [logits(stage, rows).tobytes() for rows in (1, 20)]  # noqa: E731
    assert run(second) == right
    if close_first:
        first.close()
        del first
        gc.collect()
    assert run(second) == right
