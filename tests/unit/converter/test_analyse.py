"""`blockrelay analyse` on a block folder and on its checkpoint: the same figures, and no weight is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay_converter.analyse import run
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.onnx_blocks_served import described
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.models.tiny_model import write_tiny_model


def said(capsys: pytest.CaptureFixture[str], folder: Path) -> Any:
    assert run([str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_both_forms_of_a_model_cost_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    converted, source = said(capsys, folder), said(capsys, tmp_path / "checkpoint")
    assert {**converted, "model": ""} == {**source, "model": ""}
    manifest = open_block_folder(folder).manifest
    sizes = {block.name: manifest.files[block.file].bytes for block in manifest.blocks}
    assert {name: block["bytes"]["w8a8"] for name, block in converted["blocks"].items()} == sizes


def test_no_weight_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", seed=3)
    before = said(capsys, tmp_path / "checkpoint")
    file = tmp_path / "checkpoint/model.safetensors"
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:begin] + b"\xff" * (len(content) - begin))  # all values are NaN now
    assert said(capsys, tmp_path / "checkpoint") == before


def test_neighbours_that_cost_the_same_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run([str(write_tiny_model(tmp_path))]) == 0
    shown = capsys.readouterr().out
    assert "  2-4 " in shown and "all" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        (None, "", "is not a folder"),
        ("readme", "", "holds no config.json"),
        ("config.json", "{}", "config.json: field 'model_type' is missing"),
        ("config.json", '{"model_type": "gpt2"}', "config.json: model_type 'gpt2' is not supported"),
        ("manifest.json", "{}", "manifest.json: field 'format' is missing"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str | None, content: str, line: str
) -> None:
    folder = tmp_path / "model"
    if name is not None:
        folder.mkdir()
        (folder / name).write_text(content)
    assert run([str(folder)]) in (1, 2)
    shown = capsys.readouterr()
    assert line in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_onnx_blocks_are_told_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    blocks = write_reference_blocks(tmp_path / "blocks", ReferenceModel(layers=2))
    for folder, said in ((blocks, "blockrelay up --blocks"), (described(blocks, tmp_path / "cache"), "as they are")):
        assert run([str(folder)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and said in error and "blockrelay import" in error, error


def test_a_checkpoint_without_a_tensor_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    assert run([str(tmp_path)]) == 2
    assert "model.layers.4." in capsys.readouterr().err
