"""What CPUs compute with where a GPU runs ONNX blocks as they are is imported once, and anew when the blocks change."""

import os
import shutil
from pathlib import Path

import pytest
from onnx import ModelProto

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import UsageError
from blockrelay_launcher.onnx_blocks.describe import BlocksOptions, StandIn, served_blocks
from blockrelay_launcher.onnx_blocks.stand_in import imported_stand_in
from tests.support.models.altered_blocks import altered, copied
from tests.support.models.onnx_blocks_served import described
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks

MODEL = ReferenceModel(layers=2)


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    return write_reference_blocks(tmp_path / "my-blocks", MODEL)


def test_it_is_imported_once(blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = described(blocks, tmp_path / "cache")
    out = imported_stand_in(blocks, served, max_position=None)
    assert out is not None and open_block_folder(out).manifest.precision == "fp16"
    assert f"{blocks}: imported for the CPU as {out}" in capsys.readouterr().err
    before = (out / "manifest.json").stat()
    assert imported_stand_in(blocks, served, max_position=None) == out
    after = (out / "manifest.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not capsys.readouterr().err, "nothing is new"


def test_other_blocks_in_the_same_folder_are_imported_anew(blocks: Path, tmp_path: Path) -> None:
    """Nor does it stay in the way what an ended import of the former ones has left."""
    served = described(blocks, tmp_path / "cache")
    out = imported_stand_in(blocks, served, max_position=None)
    assert out is not None
    before = open_block_folder(out).manifest
    shutil.copytree(out, out.with_name(".imported.unfinished"))
    shutil.rmtree(blocks)
    write_reference_blocks(blocks, ReferenceModel(layers=2, seed=5))
    served = described(blocks, tmp_path / "cache")
    assert imported_stand_in(blocks, served, max_position=None) == out
    assert open_block_folder(out).manifest.imported_from != before.imported_from
    assert not out.with_name(".imported.unfinished").exists()


def test_an_altered_import_is_made_anew(blocks: Path, tmp_path: Path) -> None:
    served = described(blocks, tmp_path / "cache")
    out = imported_stand_in(blocks, served, max_position=None)
    assert out is not None
    os.truncate(out / "blocks" / "block_1.bin", 5)
    assert imported_stand_in(blocks, served, max_position=None) == out
    open_block_folder(out)


def test_what_is_no_llama_is_run_as_it_is(blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def gelu(model: ModelProto) -> None:
        (one,) = (node for node in model.graph.node if node.op_type == "Sigmoid")
        one.op_type = "Erf"

    others = copied(blocks, tmp_path / "others", altered("block_2.onnx", gelu))
    served = described(others, tmp_path / "cache")
    assert imported_stand_in(others, served, max_position=None) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{others}: the CPU runs the files too, since they cannot be imported: block_2.onnx: ")
    assert "is not followed by silu" in line
    assert not list(served.glob("*imported*"))


@pytest.mark.parametrize("sequential", [False, True])
def test_files_where_they_are_asked_for(
    blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequential: bool
) -> None:
    """By the option, by blocks that are run one by one (which do not fit), and by a CPU alone."""
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    asked: tuple[tuple[StandIn | None, bool], ...] = ((None if sequential else "files", True), (None, False))
    for stand_in, gpus in asked:
        served = served_blocks(
            BlocksOptions(
                folder=blocks,
                max_position=None,
                stand_in=stand_in,
                sequential=sequential,
                max_warm_sessions=None,
                memory=None,
            ),
            gpus=gpus,
        )
        assert served is not None and served.imported is None
        assert served.warm == ({"sequential": "true"} if sequential else {})


def test_options_without_what_they_are_of() -> None:
    for gpus, sequential in ((False, False), (True, True)):
        options = BlocksOptions(
            folder=Path("blocks"),
            max_position=None,
            stand_in="imported",
            sequential=sequential,
            max_warm_sessions=None,
            memory=None,
        )
        with pytest.raises(UsageError, match="--stand-in is for --blocks with --gpu"):
            options.check(gpus=gpus)
