"""`convert --like FOLDER`: blocks whose tensors did not change are the folder's own files, whatever else changed."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.manifest import Manifest
from blockrelay_converter.__main__ import run
from blockrelay_converter.convert import convert
from blockrelay_converter.mixing import like
from blockrelay_converter.mixing.like import Like, open_like
from blockrelay_converter.mixing.linked_folder import link_mix
from blockrelay_converter.quantisation.calibration_record import REPORT_NAME
from blockrelay_worker.execution.cpu.loading import load_stage
from blockrelay_worker.kernels import load_kernels
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.planted_outliers import read_float32

LAYER_2, EMBEDDING, HEAD = "model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"
TEXT = " ".join(f"Tom has {n} apples and a red ball; the dog is in the garden, behind tree {n * 7}." for n in range(90))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "base", seed=3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def folder(checkpoint: Path) -> Path:
    """The checkpoint's block folder."""
    converted(checkpoint, checkpoint.with_name("folder"))
    return checkpoint.with_name("folder")


@pytest.fixture(scope="module")
def calibrated(checkpoint: Path, text: Path) -> Path:
    converted(checkpoint, checkpoint.with_name("calibrated"), calibration_text=text)
    return checkpoint.with_name("calibrated")


def converted(checkpoint: Path, out: Path, **options: Any) -> Manifest:
    return convert(checkpoint, out, report=lambda *_: None, **options)


def changed(checkpoint: Path, out: Path, *names: str, add: float = 0.01) -> Path:
    """The same checkpoint with other values in these tensors."""
    shutil.copytree(checkpoint, out)
    tensors = read_float32(out)
    for name in names:
        tensors[name] = tensors[name] + np.float32(add)
    save_file(tensors, out / "model.safetensors")
    return out


def alike(checkpoint: Path, out: Path, root: Path, **options: Any) -> Like:
    earlier = open_like(root, out)
    converted(checkpoint, out, like=earlier, **options)
    return earlier


def linked(one: Path, other: Path) -> list[int]:
    """The blocks that are one file in both folders."""
    blocks = open_block_folder(one, blocks=()).manifest.blocks
    return [block.index for block in blocks if (one / block.file).samefile(other / block.file)]


def test_all_blocks_but_the_changed_one_are_links_and_a_worker_has_them_once(
    checkpoint: Path, folder: Path, tmp_path: Path
) -> None:
    sibling = changed(checkpoint, tmp_path / "sibling", LAYER_2)
    found = alike(sibling, tmp_path / "out", folder)
    assert linked(tmp_path / "out", folder) == [1, 2, 4, 5]
    saved = sum(os.stat(folder / f"blocks/block_{index}.bin").st_size for index in (1, 2, 4, 5))
    assert found.line() == f"4 of 5 blocks shared with {folder}, {saved / 1000:.0f} kB saved"
    # It is the folder that a conversion of its own gives, known answers included
    converted(sibling, tmp_path / "own", name="sibling")
    assert (tmp_path / "out/manifest.json").read_bytes() == (tmp_path / "own/manifest.json").read_bytes()
    assert not linked(tmp_path / "own", folder)
    # And one process that serves both has equal blocks once
    one, other = (load(open_block_folder(root)) for root in (folder, tmp_path / "out"))
    assert [one.blocks[index] is other.blocks[index] for index in range(1, 6)] == [True, True, False, True, True]


def load(folder: BlockFolder):
    return load_stage(folder, 1, folder.model.blocks, pages=4, threads=1, kernels=load_kernels(1))


@pytest.mark.parametrize(
    ("tied", "name", "blocks"),
    [(False, EMBEDDING, [2, 3, 4, 5]), (False, HEAD, [1, 2, 3, 4]), (True, EMBEDDING, [2, 3, 4])],
)
@pytest.mark.parametrize("precision", ["w8a8", "w4a8,block_2=fp32"])
def test_another_embedding_or_head_changes_its_own_block(
    tied: bool, name: str, blocks: list[int], precision: str, tmp_path: Path
) -> None:
    base = write_checkpoint(tmp_path / "base", seed=5, tie_word_embeddings=tied, hidden_size=32, intermediate_size=64)
    converted(base, tmp_path / "folder", precision=precision)
    sibling = changed(base, tmp_path / "sibling", name)
    alike(sibling, tmp_path / "out", tmp_path / "folder")
    assert linked(tmp_path / "out", tmp_path / "folder") == blocks
    assert open_block_folder(tmp_path / "out").manifest.precision == precision


@pytest.mark.thorough
def test_blocks_of_a_calibrated_folder_are_shared_behind_a_changed_layer_too(
    checkpoint: Path, calibrated: Path, text: Path, tmp_path: Path
) -> None:
    sibling = changed(checkpoint, tmp_path / "sibling", LAYER_2, add=1.0)
    alike(sibling, tmp_path / "out", calibrated, calibration_text=text)
    assert linked(tmp_path / "out", calibrated) == [1, 2, 4, 5]
    # The changed block is calibrated as in a conversion of its own with the same text; its others are not equal
    converted(sibling, tmp_path / "own", name="sibling", calibration_text=text)
    own, out = (open_block_folder(tmp_path / name).manifest for name in ("own", "out"))
    assert [own.block_file(i) == out.block_file(i) for i in range(1, 6)] == [True, True, True, False, False]
    assert own.block(3).known_answer == out.block(3).known_answer
    # What it was calibrated with is kept on: without the text, and for the next one
    alike(sibling, tmp_path / "again", tmp_path / "out")
    assert linked(tmp_path / "again", tmp_path / "out") == [1, 2, 3, 4, 5]
    records = [json.loads((root / REPORT_NAME).read_bytes()) for root in (tmp_path / "out", tmp_path / "again")]
    assert records[0] == records[1]
    assert records[0]["relative_errors"]["block_3"]["qkv"]["after"] > 0


@pytest.mark.thorough
def test_a_mix_of_calibrated_folders_is_calibrated(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    parts: list[BlockFolder] = []
    for precision in ("w8a8", "w4a8"):
        options: dict[str, Any] = {"precision": precision, "calibration_text": text, "basis": "original"}
        converted(checkpoint, tmp_path / precision, answers=True, **options)
        parts.append(open_block_folder(tmp_path / precision))
    (tmp_path / "mix").mkdir()
    link_mix(parts, ("w8a8", "w4a8", "w8a8", "w4a8", "w8a8"), tmp_path / "mix")
    alike(changed(checkpoint, tmp_path / "sibling", LAYER_2), tmp_path / "out", tmp_path / "mix")
    assert linked(tmp_path / "out", tmp_path / "mix") == [1, 2, 4, 5]


@pytest.mark.thorough
def test_where_the_file_system_has_no_links_equal_blocks_are_copies(
    checkpoint: Path, folder: Path, calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(like.os, "link", refused)
    sibling = changed(checkpoint, tmp_path / "sibling", LAYER_2)
    for root in (folder, calibrated):
        out = tmp_path / root.name
        found = alike(sibling, out, root)
        assert linked(out, root) == []
        assert found.line() == f"4 of 5 blocks equal to those of {root}, as copies: no links lead there"
        mine, theirs = open_block_folder(out).manifest, open_block_folder(root).manifest
        assert [mine.block_file(i) == theirs.block_file(i) for i in range(1, 6)] == [True, True, False, True, True]


def test_another_text_around_the_same_tokens_is_no_hindrance(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    sibling = changed(checkpoint, tmp_path / "sibling")
    (sibling / "generation_config.json").write_text('{"temperature": 0.5}')
    tokenizer = json.loads((sibling / "tokenizer.json").read_bytes())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
    (sibling / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    alike(sibling, tmp_path / "out", folder)
    assert linked(tmp_path / "out", folder) == [1, 2, 3, 4, 5]
    assert open_block_folder(tmp_path / "out").manifest.generation.temperature == 0.5


def test_the_command_says_what_is_shared(
    checkpoint: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(checkpoint), str(tmp_path / "out"), "--like", str(folder), "--precision", "w8a8"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"5 of 5 blocks shared with {folder}, 258 kB saved"
    assert out.splitlines()[1].startswith(f"{tmp_path / 'out'}: base, w8a8, 5 blocks, ") and not err
    other = write_checkpoint(tmp_path / "other", seed=4)
    assert run([str(other), str(tmp_path / "out"), "--like", str(folder), "--force"]) == 0
    line = f"0 of 5 blocks shared with {folder}: it was made of other tensors, or calibrated and lost calibration.json"
    assert capsys.readouterr().out.splitlines()[0] == line
    assert open_block_folder(folder), "the links of the folder that was replaced were its own"


REFUSED: dict[str, tuple[list[str], str]] = {
    "precision": (["--precision", "w4a8"], "is in w8a8; leave out --precision"),
    "budget": (["--budget-perplexity", "1%", "--text", "TEXT"], "leave one out"),
    "calibrate": (["--calibrate", "TEXT"], "is not calibrated; leave out --calibrate"),
    "answers": (["--no-known-answers"], "leave out --no-known-answers"),
    "context": (["--max-position", "64"], "has a context of 512; leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_contradict_the_folder_are_refused(
    case: str, checkpoint: Path, folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = REFUSED[case]
    options = [str(text) if option == "TEXT" else option for option in options]
    refused(capsys, tmp_path, message, str(checkpoint), str(tmp_path / "out"), "--like", str(folder), *options)


def refused(capsys: pytest.CaptureFixture[str], place: Path, message: str, *arguments: str) -> None:
    """The command ends with 2 and one line that has `message`, and writes nothing beside OUT."""
    before = sorted(place.iterdir())
    assert run([*arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out, err
    assert sorted(place.iterdir()) == before


SIBLINGS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"hidden_size": 32}, "has another shape: hidden_size 64, where the checkpoint has 32"),
    "depth": ({"num_hidden_layers": 3}, "has another shape: layers 4, where the checkpoint has 3"),
    "family": ({"family": "qwen3"}, "has another shape: "),
    "eps": ({"rms_norm_eps": 1e-6}, "has another shape: rms_norm_eps"),
    "context": ({"max_position_embeddings": 256}, "has a context of 512 tokens, the checkpoint 256"),
    "rotary": ({"rope_theta": 20000.0}, "has another rotary embedding"),
    "tokenizer": ({"tokenizer": False}, "has another tokenizer"),
}


@pytest.mark.parametrize("case", SIBLINGS)
def test_a_folder_of_another_model_is_refused(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, message = SIBLINGS[case]
    sibling = write_checkpoint(tmp_path / "sibling", seed=3, **settings)
    refused(capsys, tmp_path, message, str(sibling), str(tmp_path / "out"), "--like", str(folder))


def test_a_folder_with_other_words_in_its_tokenizer_is_refused(
    checkpoint: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sibling = changed(checkpoint, tmp_path / "sibling")
    tokenizer = json.loads((sibling / "tokenizer.json").read_bytes())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (sibling / "tokenizer.json").write_text(json.dumps(tokenizer))
    arguments = [str(sibling), str(tmp_path / "out"), "--like", str(folder)]
    refused(capsys, tmp_path, "has another tokenizer", *arguments)


def test_a_longer_context_of_the_checkpoint_is_cut_to_the_folders(folder: Path, tmp_path: Path) -> None:
    sibling = write_checkpoint(tmp_path / "sibling", seed=3, max_position_embeddings=1024)
    alike(sibling, tmp_path / "out", folder)
    assert open_block_folder(tmp_path / "out").model.max_position == 512
    assert linked(tmp_path / "out", folder) == [1, 2, 3, 4, 5]


def _is_none(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


def _is_damaged(root: Path) -> None:
    path = root / "blocks/block_4.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def _is_of_onnx_blocks(root: Path) -> None:
    manifest = open_block_folder(root, blocks=()).manifest
    files = {"blocks.json": manifest.files["rotary.bin"], "rotary.bin": manifest.files["rotary.bin"]}
    shutil.copy(root / "rotary.bin", root / "blocks.json")
    blocks = [replace(block, file="rotary.bin", tensors={}) for block in manifest.blocks]
    model = replace(manifest.model, onnx_layers=(1, 1, 1, 1, 0))
    precisions: Any = ("fp32",) * 5
    told = replace(
        manifest, model=model, files=files, graphs={}, blocks=tuple(blocks), precisions=precisions, exact=False
    )
    (root / "manifest.json").write_bytes(told.encode())


def _has_no_answers(root: Path) -> None:
    manifest = open_block_folder(root, blocks=()).manifest
    blocks = tuple(replace(block, known_answer=None) for block in manifest.blocks)
    (root / "manifest.json").write_bytes(replace(manifest, blocks=blocks).encode())


def _was_calibrated_by_an_older_release(root: Path) -> None:
    (root / REPORT_NAME).write_text('{"text_sha256": "00", "tokens": 2048, "relative_errors": {}}')


def _has_the_calibration_of_another(root: Path) -> None:
    record = json.loads((root.parent / "calibrated" / REPORT_NAME).read_bytes())
    (root / REPORT_NAME).write_text(json.dumps(record))


FOLDERS: dict[Callable[[Path], None], str] = {
    _is_none: "no block folder, it has no manifest.json",
    _is_damaged: "block_4.bin: altered",
    _is_of_onnx_blocks: "its ONNX blocks were made by others",
    _has_no_answers: "block_1 has no known answer; convert the model again",
    _was_calibrated_by_an_older_release: "kept no text: convert its checkpoint again with --calibrate",
    _has_the_calibration_of_another: "it is of another block_1",
}


@pytest.mark.parametrize("alter", FOLDERS, ids=lambda alter: alter.__name__)
def test_a_folder_that_cannot_be_taken_is_refused(
    alter: Callable[[Path], None],
    checkpoint: Path,
    folder: Path,
    calibrated: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(folder, tmp_path / "folder")
    shutil.copytree(calibrated, tmp_path / "calibrated")
    alter(tmp_path / "folder")
    arguments = [str(checkpoint), str(tmp_path / "out"), "--like", str(tmp_path / "folder")]
    refused(capsys, tmp_path, FOLDERS[alter], *arguments)


def test_another_text_than_that_of_the_folder_is_refused(
    checkpoint: Path, calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").write_text(f"{TEXT} Yes.")
    options = ["--like", str(calibrated), "--calibrate", str(tmp_path / "other")]
    message = "was calibrated with another text; leave out --calibrate"
    refused(capsys, tmp_path, message, str(checkpoint), str(tmp_path / "out"), *options)


@pytest.mark.parametrize("place", ["folder", "folder/inside", ".", "link/inside"])
def test_a_place_within_the_folder_or_around_it_is_refused(
    place: str, checkpoint: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "folder")
    (tmp_path / "link").symlink_to("folder")
    options = ["--like", str(tmp_path / "folder"), "--force"]
    refused(capsys, tmp_path, "lie in each other", str(checkpoint), str(tmp_path / place), *options)


def test_answers_of_single_blocks_are_computed_alone(folder: Path) -> None:
    command = [sys.executable, "-m", "blockrelay_worker.execution.self_test", str(folder)]
    expected = {block.name: block.known_answer for block in open_block_folder(folder).manifest.blocks}
    done = subprocess.run([*command, "2", "5"], capture_output=True, check=True, text=True)
    lines: list[dict[str, str]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [{name: expected[name]} for name in ("block_2", "block_5")]
    for blocks, message in ((["6"], "there is no block_6"), (["x"], "usage: ")):
        wrong = subprocess.run([*command, *blocks], capture_output=True, check=False, text=True)
        assert wrong.returncode == 2 and message in wrong.stderr
