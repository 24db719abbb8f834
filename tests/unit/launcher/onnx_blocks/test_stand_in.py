"""What CPUs compute with where a GPU runs ONNX blocks as they are is imported once, and anew when the blocks change."""

import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from onnx import ModelProto

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import UsageError
from blockrelay_launcher.onnx_blocks.describe import served_blocks
from blockrelay_launcher.onnx_blocks.stand_in import HeldImport, held_import
from blockrelay_launcher.up_options.groups import ServedModelOptions, StandInBy
from blockrelay_worker.offline.onnx_blocks.describe import run
from blockrelay_worker.offline.onnx_blocks.splitting.split import run as split
from tests.support.models.altered_blocks import altered, copied
from tests.support.models.genai_decoder import Packing, genai_decoder
from tests.support.models.onnx_blocks_served import described
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.models.whole_decoders import SMALL, saved
from tests.support.waiting import wait_until

pytestmark = pytest.mark.onnx_blocks

MODEL, OTHER = ReferenceModel(layers=2), ReferenceModel(layers=2, seed=5)


def asked(folder: Path, *, stand_in: StandInBy | None = None, sequential: bool = False) -> ServedModelOptions:
    """What `up` was asked for."""
    return ServedModelOptions(blocks=folder, stand_in=stand_in, sequential=sequential)


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    return write_reference_blocks(tmp_path / "my-blocks", MODEL)


class Ups:
    """Every `up` that serves the blocks: what each of them holds."""

    def __init__(self) -> None:
        self.held: list[HeldImport] = []

    def begin(self, blocks: Path, served: Path) -> Path:
        """With an import."""
        found = held_import(blocks, served)
        assert isinstance(found, HeldImport), found
        self.held.append(found)
        return found.folder

    def end(self) -> None:
        while self.held:
            os.close(self.held.pop().held)


@pytest.fixture
def ups() -> Iterator[Ups]:
    made = Ups()
    yield made
    made.end()


def made_at(folder: Path) -> tuple[int, int]:
    found = (folder / "manifest.json").stat()
    return found.st_ino, found.st_mtime_ns


def test_it_is_imported_once(blocks: Path, tmp_path: Path, ups: Ups, capsys: pytest.CaptureFixture[str]) -> None:
    served = described(blocks, tmp_path / "cache")
    out = ups.begin(blocks, served)
    assert open_block_folder(out).manifest.precision == "fp16"
    assert capsys.readouterr().err == f"{blocks}: imports them for the CPU; --stand-in files does without\n"
    before = made_at(out), made_at(served)
    assert described(blocks, tmp_path / "cache") == served and ups.begin(blocks, served) == out
    assert (made_at(out), made_at(served)) == before, "a cache that is complete may lie where nobody can write"
    assert not capsys.readouterr().err


def test_two_at_once_import_once(blocks: Path, tmp_path: Path, ups: Ups) -> None:
    served = described(blocks, tmp_path / "cache")
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda _: made_at(ups.begin(blocks, served)), range(2))
    assert first == second


def test_who_comes_while_another_imports_waits(
    blocks: Path, tmp_path: Path, ups: Ups, capsys: pytest.CaptureFixture[str]
) -> None:
    served, said = described(blocks, tmp_path / "cache"), ""

    def waits() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "waits for another `up`" in said

    with ThreadPoolExecutor() as pool, (served / "imported.lock").open("w") as lock:  # a failure gives the lock back
        fcntl.flock(lock, fcntl.LOCK_EX)
        asked = pool.submit(ups.begin, blocks, served)
        wait_until(waits, "it says that it waits")
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert asked.result() == served / "imported"


def test_other_blocks_in_the_same_folder_are_another_model(blocks: Path, tmp_path: Path, ups: Ups) -> None:
    """Who serves the former ones keeps their import; when nobody does, it goes, and what a broken one has left."""
    former = described(blocks, tmp_path / "cache")
    first = ups.begin(blocks, former)
    for path in blocks.iterdir():
        path.unlink()
    write_reference_blocks(blocks, OTHER)
    served = described(blocks, tmp_path / "cache")
    assert served != former and (former / "manifest.json").exists()
    second = ups.begin(blocks, served)
    assert first.exists()
    assert open_block_folder(second).manifest.imported_from != open_block_folder(first).manifest.imported_from
    ups.end()
    (former / ".imported.unfinished").mkdir()
    assert ups.begin(blocks, served) == second
    assert not first.exists() and not (former / ".imported.unfinished").exists()
    assert (former / "manifest.json").exists()


def test_another_context_of_the_same_files_leaves_the_import_of_the_former_one(
    blocks: Path, tmp_path: Path, ups: Ups
) -> None:
    """Somebody may come back to it."""
    long, short = described(blocks, tmp_path / "cache"), described(blocks, tmp_path / "cache", "--max-position", "64")
    first = ups.begin(blocks, long)
    ups.end()
    second = ups.begin(blocks, short)
    assert first.exists() and open_block_folder(second).model.max_position == 64
    assert made_at(ups.begin(blocks, long)) == made_at(first)


def packed(folder: Path, *, bits: int, float16: bool) -> Path:
    """Blocks with packed weights, of onnxruntime-genai."""
    model = genai_decoder(replace(SMALL, layers=1), packing=Packing(bits=bits), float16=float16)
    path = saved(model, folder / "whole" / "model.onnx", external=True)
    assert split([str(path), str(folder / "blocks")]) == 0
    return folder / "blocks"


@pytest.mark.parametrize("bits", [4, 8])
def test_files_that_are_smaller_than_their_import_are_run_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: int
) -> None:
    """Known before anything is written, as is a context that their tables do not have."""
    blocks = packed(tmp_path, bits=bits, float16=False)
    why = held_import(blocks, described(blocks, tmp_path / "cache"))
    assert isinstance(why, str) and "--max-position 4096 is beyond the model's context of 1024" in why
    served = described(blocks, tmp_path / "cache", "--max-position", "1024")
    why = held_import(blocks, served)
    assert why == f"their weights are {bits} bits in groups of 32, which an import widens to fp32"
    assert not list(served.glob("*imported*/"))


def test_a_damaged_import_is_made_anew_when_nobody_serves_with_it(blocks: Path, tmp_path: Path, ups: Ups) -> None:
    served = described(blocks, tmp_path / "cache")
    out = ups.begin(blocks, served)
    with (out / "blocks" / "block_1.bin").open("r+b") as file:  # of the same size
        file.write(b"x")
    why = held_import(blocks, served)
    assert isinstance(why, str) and "block_1.bin: altered: " in why and why.endswith("; another `up` serves with it")
    ups.end()
    assert ups.begin(blocks, served) == out
    open_block_folder(out)


def test_what_is_no_llama_is_run_as_it_is(
    blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or not at all, if an import was asked for."""

    def gelu(model: ModelProto) -> None:
        (one,) = (node for node in model.graph.node if node.op_type == "Sigmoid")
        one.op_type = "Erf"

    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    others = copied(blocks, tmp_path / "others", altered("block_2.onnx", gelu))
    served = served_blocks(asked(others), gpus=True)
    assert served is not None and served.with_import(stages=1).imported is None
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{others}: the CPU runs the files too, since they cannot be imported: block_2.onnx: ")
    assert "is not followed by silu" in line
    assert not (served.model / "imported").exists() and not (served.model / ".imported.unfinished").exists()
    demanded = served_blocks(asked(others, stand_in="imported"), gpus=True)
    assert demanded is not None
    with pytest.raises(UsageError, match=r"--stand-in imported: .* cannot be imported: block_2"):
        demanded.with_import(stages=1)


def test_a_cache_that_cannot_be_written_is_named(
    blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "file"))
    assert run(["--", str(blocks)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "file") in line and "BLOCKRELAY_CACHE_DIR names another folder" in line


def test_several_stages_are_run_with_the_files(blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import makes no masks and rotations for the blocks of a device."""
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    served, demanded = (served_blocks(asked(blocks, stand_in=one), gpus=True) for one in (None, "imported"))
    assert served is not None and served.imports and served.with_import(stages=2) == served
    assert demanded is not None
    with pytest.raises(UsageError, match="--stand-in imported is for one stage, and the plan has 2"):
        demanded.with_import(stages=2)


@pytest.mark.parametrize("sequential", [False, True])
def test_files_where_they_are_asked_for(
    blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequential: bool
) -> None:
    """By the option, by blocks that are run one by one (which do not fit), and by a CPU alone."""
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    beside_gpu = asked(blocks, stand_in=None if sequential else "files", sequential=sequential)
    for options, gpus in ((beside_gpu, True), (asked(blocks, sequential=sequential), False)):
        served = served_blocks(options, gpus=gpus)
        assert served is not None and served.with_import(stages=1) == served and served.imported is None
        assert served.warm == ({"sequential": "true"} if sequential else {})


def test_options_without_what_they_are_of() -> None:
    for gpus, sequential in ((False, False), (True, True)):
        with pytest.raises(UsageError, match="--stand-in is for --blocks with --gpu"):
            asked(Path("blocks"), stand_in="imported", sequential=sequential).check_stand_in(gpus=gpus)
