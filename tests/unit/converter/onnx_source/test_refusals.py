"""Blocks that are not imported: one line that names file and tensor, exit code 2, and nothing left behind."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.llama.pattern import recognise
from blockrelay.onnx_blocks.reports.importing import ComparedPlaces
from blockrelay_converter.onnx_source.__main__ import run
from blockrelay_converter.onnx_source.files import read_onnx_blocks
from blockrelay_converter.onnx_source.licence import compare
from tests.support.models.altered_blocks import Change, altered, copied, externalised
from tests.support.models.imported import imported
from tests.support.models.reference_blocks import SIN, ReferenceModel, write_reference_blocks

pytestmark = pytest.mark.onnx_blocks

MODEL = ReferenceModel(layers=2)
AT = "/model/layers.1"
WEIGHTS = "model.layers.1"


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reference_blocks(tmp_path_factory.mktemp("blocks") / "blocks", MODEL)


def node_before(model: ModelProto, name: str, kind: str, *more: str) -> None:
    """The node `name` gets its first input through another operator."""
    (place,) = (place for place, node in enumerate(model.graph.node) if node.name == name)
    node = model.graph.node[place]
    made = helper.make_node(kind, [node.input[0], *more], [f"{name}/before"], name=f"{name}/before")
    node.input[0] = made.output[0]
    model.graph.node.insert(place, made)


def constant(model: ModelProto, name: str, change: Callable[["np.ndarray"], "np.ndarray"]) -> None:
    """A constant with other numbers in it."""
    (tensor,) = (one for one in model.graph.initializer if one.name == name)
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), name))


def fed(model: ModelProto, name: str, index: int, value: str) -> None:
    """A node takes something else as an input."""
    (node,) = (one for one in model.graph.node if one.name == name)
    node.input[index] = value


def biased(model: ModelProto) -> None:
    """The product behind attention has a bias."""
    model.graph.initializer.append(numpy_helper.from_array(np.ones(MODEL.hidden, np.float16), "o.bias"))
    (place,) = (place for place, one in enumerate(model.graph.node) if one.name == f"{AT}/self_attn/o_proj/MatMul")
    output = model.graph.node[place].output[0]
    model.graph.node[place].output[0] = f"{output}/plain"
    model.graph.node.insert(place + 1, helper.make_node("Add", [f"{output}/plain", "o.bias"], [output]))


def doubled(model: ModelProto) -> None:
    """As an activation of GPT-2: silu of 1.702 times what comes in, not as one operator."""
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(1.702, np.float16), "sharper"))
    node_before(model, f"{AT}/mlp/act_fn/Sigmoid", "Mul", "sharper")


def without_norms(folder: Path) -> None:
    """As in GPT-2, whose norms are of another kind."""
    for path in folder.glob("block_*.onnx"):
        altered(path.name, unsquared)(folder)


def unsquared(model: ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "ReduceMean":
            node.op_type = "ReduceSum"


#: What is altered, and what the one line must say.
CASES: dict[str, tuple[Change, str]] = {
    "a gelu": (
        altered("block_2.onnx", lambda model: setattr(_named(model, f"{AT}/mlp/act_fn/Sigmoid"), "op_type", "Erf")),
        f"block_2.onnx: {AT}/mlp/gate_proj/MatMul_output_0: is not followed by silu",
    ),
    "a sharper silu": (
        altered("block_2.onnx", doubled),
        f"block_2.onnx: {AT}/mlp/gate_proj/MatMul_output_0: is not followed by silu",
    ),
    "another epsilon": (
        altered("block_2.onnx", lambda model: constant(model, "epsilon", lambda one: one * np.float32(0.1))),
        f"block_2.onnx: {AT}/input_layernorm/Mul_1_output_0: is a norm with epsilon 1e-06, and the first one has 1e-05",
    ),
    "other norms": (without_norms, "block_1.onnx: has no RMS norms; a Llama of 2 layers has 5"),
    "a scale of attention": (
        altered("block_2.onnx", lambda model: constant(model, "scale", lambda one: one * np.float16(2))),
        f"block_2.onnx: {AT}/Add_1_output_0: the hidden rows of the imported block_2 are others: off by",
    ),
    "another rotation": (
        altered("block_2.onnx", lambda model: fed(model, f"{AT}/self_attn/k/Mul", 1, SIN)),
        "block_2.onnx: present.1.key: the keys of the imported block_2 are others: off by",
    ),
    "attention to all positions": (
        altered("block_2.onnx", lambda model: fed(model, f"{AT}/self_attn/Add", 1, f"{AT}/self_attn/Mul_output_0")),
        f"block_2.onnx: {AT}/Add_1_output_0: the hidden rows of the imported block_2 are others: off by",
    ),
    "a residual before its norm": (
        altered("block_2.onnx", lambda model: fed(model, f"{AT}/Add_1", 0, "/model/layers.0/Add_1_output_0")),
        f"block_2.onnx: {AT}/Add_1_output_0: the hidden rows of the imported block_2 are others: off by",
    ),
    "logits that are capped": (
        altered("block_3.onnx", lambda model: node_before(model, "/lm_head/MatMul", "Tanh")),
        "block_3.onnx: /model/norm/Mul_1_output_0: is the last norm, and 1 linear layers follow it instead of the head",
    ),
    "a bias": (altered("block_2.onnx", biased), "block_2.onnx: o.bias: is a bias, which Llama has for queries"),
    "a layer twice": (
        lambda folder: shutil.copy(folder / "block_2.onnx", folder / "block_3.onnx"),
        "block_3.onnx: /model/layers.1/Add_1_output_0: has two sources",
    ),
    "a missing block": (lambda folder: os.unlink(folder / "block_2.onnx"), "block_2.onnx is missing"),
    "no ONNX": (
        lambda folder: (folder / "block_2.onnx").write_bytes(b"GGUF" * 99),
        "block_2.onnx: is not an ONNX file, or a part of one",
    ),
    "weights that are not finite": (
        altered(
            "block_2.onnx",
            lambda model: constant(model, f"{WEIGHTS}.mlp.up_proj.weight", lambda one: one * np.float16(np.nan)),
        ),
        f"block_2.onnx: {WEIGHTS}.mlp.up_proj.weight: holds values that are not finite",
    ),
    "weights of another type": (
        altered(
            "block_2.onnx",
            lambda model: constant(model, f"{WEIGHTS}.mlp.up_proj.weight", lambda one: one.astype(np.float64)),
        ),
        f"block_2.onnx: {WEIGHTS}.mlp.up_proj.weight: is float64; weights must be float16 or float32",
    ),
    "weights of another width": (
        altered(
            "block_2.onnx", lambda model: constant(model, f"{WEIGHTS}.mlp.up_proj.weight", lambda one: one[:, :-8])
        ),
        f"block_2.onnx: {WEIGHTS}.mlp.up_proj.weight: has shape [120, 64] as model.layers.1.mlp.up_proj.weight",
    ),
    "weights outside the folder": (
        altered("block_2.onnx", lambda model: externalised(model, "../weights.bin")),
        "names weights outside the folder: '../weights.bin'",
    ),
    "weights beside it that are missing": (
        altered("block_2.onnx", lambda model: externalised(model, "weights.bin")),
        "'weights.bin' is missing or cannot be read",
    ),
    "weights beside it that end too early": (
        lambda folder: (
            (folder / "weights.bin").write_bytes(b"few"),
            altered("block_2.onnx", lambda model: externalised(model, "weights.bin"))(folder),
        ),
        "of weights.bin, which has 3: altered or cut off",
    ),
    "the last block is missing": (
        lambda folder: (folder / "block_3.onnx").unlink(),
        "has no output logits, and nor has another block: is the last one missing?",
    ),
    "a chat template that is none": (
        lambda folder: (folder / "chat_template.jinja").write_text("{% for m in"),
        "blocks: its chat template is not Jinja: line 1",
    ),
    "a config.json that is none": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "a window of attention": (
        lambda folder: (folder / "config.json").write_text(
            json.dumps({"model_type": "mistral", "max_position_embeddings": 4096, "sliding_window": 1024})
        ),
        "config.json: sliding_window 1024 is not supported",
    ),
    "a window of attention in a family that is imported as a Llama": (
        lambda folder: (folder / "config.json").write_text(
            json.dumps({"model_type": "phi3", "max_position_embeddings": 4096, "sliding_window": 2047})
        ),
        "config.json: sliding_window 2047 is not supported",
    ),
    "an end token beyond the vocabulary": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": 9999}'),
        "eos_token_id 9999 is outside the vocabulary of 512",
    ),
}


def _named(model: ModelProto, name: str) -> object:
    (node,) = (one for one in model.graph.node if one.name == name)
    return node


@pytest.mark.parametrize("case", CASES)
def test_one_line_names_what_is_wrong(
    blocks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    change, expected = CASES[case]
    folder = copied(blocks, tmp_path / "blocks", change)
    assert run([str(folder), str(tmp_path / "new" / "out")]) == 2
    error = capfd.readouterr().err
    assert error.startswith("blockrelay: ") and error.count("\n") == 1
    assert expected in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks"]


OPTIONS = {
    "an unknown precision": (["--precision", "w2a8"], "'w2a8' is none of"),
    "a text without a tokenizer": (["--precision", "w8a8", "--text", __file__], "--text needs a tokenizer.json"),
    "a text that is not there": (["--text", "nowhere"], "--text nowhere: there is no such file"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_are_looked_at_first(
    blocks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    options, expected = OPTIONS[case]
    assert run([*options, str(blocks), str(tmp_path / "out")]) == 2
    assert expected in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_taken_place_is_left_alone(blocks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert run([str(blocks), str(tmp_path / "out")]) == 2
    assert capfd.readouterr().err == f"blockrelay: {tmp_path / 'out'} exists and is not empty\n"
    assert (tmp_path / "out" / "mine").read_text() == "mine"


def test_a_full_disk_is_told_before_anything_is_written(
    blocks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))  # pyright: ignore
    assert run([str(blocks), str(tmp_path / "out")]) == 2
    assert "has no room: the import takes" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_import_with_gate_and_up_in_each_others_place_is_told(blocks: Path, tmp_path: Path) -> None:
    """The comparison alone sees that: the imported folder is whole, and of another model."""

    def swap(model: ModelProto) -> None:
        names = [f"{WEIGHTS}.mlp.{part}_proj.weight" for part in ("gate", "up")]
        one, other = (next(one for one in model.graph.initializer if one.name == name) for name in names)
        one.name, other.name = other.name, one.name

    other = copied(blocks, tmp_path / "blocks", altered("block_2.onnx", swap))
    found = imported(other, tmp_path / "out")
    llama = recognise(read_onnx_blocks(blocks).graph)
    with pytest.raises(OnnxBlocksError, match=r"^block_2.onnx: /model/layers.1/Add_1_output_0: the hidden rows"):
        compare(blocks, found.folder.root, ComparedPlaces(llama.layers, llama.logits), lambda block: None)


def test_an_import_with_another_weight_is_told(blocks: Path, tmp_path: Path) -> None:
    other = write_reference_blocks(tmp_path / "blocks", replace(MODEL, seed=2))
    found = imported(other, tmp_path / "out")
    llama = recognise(read_onnx_blocks(blocks).graph)
    with pytest.raises(OnnxBlocksError, match=r"^block_1.onnx: present.0.key: the keys of the imported block_1"):
        compare(blocks, found.folder.root, ComparedPlaces(llama.layers, llama.logits), lambda block: None)
