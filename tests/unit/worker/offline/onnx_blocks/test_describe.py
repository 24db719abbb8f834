"""What services need to serve ONNX blocks as they are: made of the folder and what lies beside, or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import BlockFolderError
from blockrelay.onnx_blocks.beside import DEFAULT_CONTEXT
from blockrelay_worker.offline.onnx_blocks.describe import run
from blockrelay_worker.offline.onnx_blocks.onnx_file import read_onnx_file
from tests.support.models.altered_blocks import altered, copied, resized
from tests.support.models.checkpoints import write_tokenizer
from tests.support.models.onnx_blocks_served import described, opened


def told(folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines about what is lacking."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKRELAY_CACHE_DIR", str(cache))
        assert run(["--", str(folder)]) == 0
    return json.loads(capsys.readouterr().out)["lacking"]


def test_a_bare_folder_is_served_by_tokens_and_says_what_it_lacks(
    with_weights_beside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(with_weights_beside.iterdir())
    folder = opened(with_weights_beside, tmp_path)
    model = folder.model
    assert (model.layers, model.blocks, model.onnx_layers) == (3, 4, (1, 1, 1, 0))
    assert [model.layers_in(*part) for part in ((1, 4), (2, 3), (3, 4), (4, 4))] == [3, 2, 1, 0], "by parts"
    assert (model.kv_heads, model.head_dim, model.vocab_size) == (2, 16, 512)
    assert (model.max_position, model.eos_ids, folder.tokenizer_path) == (DEFAULT_CONTEXT, (), None)
    assert (folder.manifest.precision, folder.manifest.exact) == ("fp16", False)
    assert sorted(with_weights_beside.iterdir()) == before, "nothing is written there"
    context, tokenizer, ends = told(with_weights_beside, tmp_path, capsys)
    assert "how long a context is: 4096 positions" in context
    assert tokenizer.startswith("no tokenizer.json") and ends.startswith("no end tokens")


def test_what_lies_beside_is_taken(blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(blocks, tmp_path / "blocks")
    write_tokenizer(folder, vocab_size=512)
    texts: dict[str, dict[str, Any]] = {
        "config.json": {"max_position_embeddings": 128, "eos_token_id": 5},
        "generation_config.json": {"eos_token_id": [2, 3], "temperature": 0.5, "do_sample": True},
        "tokenizer_config.json": {"chat_template": "{{ messages[0].content }}", "eos_token": "</s>"},
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content))
    found = opened(folder, tmp_path / "cache")
    assert (found.model.max_position, found.model.eos_ids, found.model.eos_token) == (128, (2, 3), "</s>")
    assert found.manifest.generation.temperature == 0.5
    assert found.tokenizer_path is not None and found.chat_template() == "{{ messages[0].content }}"
    assert told(folder, tmp_path / "cache", capsys) == []
    assert opened(folder, tmp_path / "cache", "--max-position", "64").model.max_position == 64


def test_genai_says_it_in_a_file_of_its_own(blocks: Path, tmp_path: Path) -> None:
    folder = copied(blocks, tmp_path / "blocks")
    said = {"model": {"context_length": 256, "eos_token_id": [7], "bos_token_id": 1}, "search": {"top_k": 50}}
    (folder / "genai_config.json").write_text(json.dumps(said))
    model = opened(folder, tmp_path / "cache").model
    assert (model.max_position, model.eos_ids, model.bos_id) == (256, (7,), 1)


def test_the_same_blocks_are_the_same_model_wherever_they_lie(blocks: Path, tmp_path: Path) -> None:
    other = copied(blocks, tmp_path / "elsewhere" / blocks.name)
    assert opened(blocks, tmp_path / "a").model_key == opened(other, tmp_path / "b").model_key


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda folder: (folder / "block_2.onnx.data").write_bytes(b"x"), "altered: 1 bytes instead of"),
        (lambda folder: _flip(folder / "block_2.onnx.data"), "its SHA-256 is not the one"),
        (lambda folder: _flip(folder / "block_3.onnx"), "its SHA-256 is not the one"),
        (
            lambda folder: (folder / "block_3.onnx").unlink(),
            "'block_3.onnx' is missing or cannot be read",
        ),
        (lambda folder: _link_out(folder / "block_3.onnx"), "is a link out of the folder"),
    ],
)
def test_what_has_changed_since_is_not_served(
    with_weights_beside: Path, tmp_path: Path, alter: Callable[[Path], object], said: str
) -> None:
    folder = copied(with_weights_beside, tmp_path / "blocks")
    made = described(folder, tmp_path / "cache")
    open_block_folder(made)
    alter(folder)
    with pytest.raises(BlockFolderError, match=said):
        open_block_folder(made)


def test_the_blocks_of_a_stage_are_read_and_no_others(with_weights_beside: Path, tmp_path: Path) -> None:
    """Their weights too. How large a file is is looked at for all of them."""
    folder = copied(with_weights_beside, tmp_path / "blocks")
    made = described(folder, tmp_path / "cache")
    _flip(folder / "block_2.onnx.data")
    for blocks in ([], [1], [3, 4]):
        open_block_folder(made, blocks=blocks)
    with pytest.raises(BlockFolderError, match=r"block_2\.onnx\.data: altered: its SHA-256 is not the one"):
        open_block_folder(made, blocks=[2, 3])
    _flip(made / "blocks.json")
    with pytest.raises(BlockFolderError, match=r"blocks\.json"):
        open_block_folder(made, blocks=[1])


def test_a_manifest_with_other_layers_in_its_blocks_is_refused(blocks: Path, tmp_path: Path) -> None:
    made = described(blocks, tmp_path)
    content = json.loads((made / "manifest.json").read_bytes())
    content["model"]["onnx_layers"] = [1, 1, 0, 0]
    (made / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(BlockFolderError, match=r"onnx_layers \[1, 1, 0, 0\] are not 3 layers together"):
        open_block_folder(made)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _link_out(path: Path) -> None:
    other = path.parent.parent / "other.onnx"
    path.rename(other)
    path.symlink_to(other)


def _without_logits(model: ModelProto) -> None:
    model.graph.output[0].name = "scores"
    model.graph.node[-1].output[0] = "scores"


def _open_vocabulary(model: ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_param = "vocabulary"


def _open_heads(model: ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past", "present")):
            value.type.tensor_type.shape.dim[1].dim_param = "heads"


@pytest.mark.parametrize(
    ("block", "alter", "said"),
    [
        (4, _without_logits, "block_4.onnx: has no output logits"),
        (4, _open_vocabulary, "block_4.onnx: logits: is float16 (batch_size, sequence_length, vocabulary), and must"),
        (4, lambda model: _retype(model, "logits", TensorProto.INT64), "block_4.onnx: logits: is int64"),
        (2, _open_heads, "block_2.onnx: past_key_values.1.key: is (batch_size, heads, "),
        (2, lambda model: _all_caches(model, lambda name: resized(model, name, 1, 4)), "has 4 heads of 16 in float16"),
        (2, lambda model: _all_caches(model, lambda name: _retype(model, name, 1)), "has 2 heads of 16 in float32"),
    ],
)
def test_blocks_that_cannot_be_served_are_refused_by_file_and_tensor(
    blocks: Path,
    tmp_path: Path,
    block: int,
    alter: Callable[[ModelProto], object],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    folder = copied(blocks, tmp_path / "blocks", altered(f"block_{block}.onnx", alter))
    assert run(["--", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "cache").exists(), "nothing was written"


def _retype(model: ModelProto, name: str, kind: int) -> None:
    for value in (*model.graph.input, *model.graph.output):
        if value.name == name:
            value.type.tensor_type.elem_type = kind


def _all_caches(model: ModelProto, change: Callable[[str], object]) -> None:
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past", "present")):
            change(value.name)


def test_blocks_without_a_cache_or_tokens_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    value = helper.make_tensor_value_info
    for name, said in (("input_ids", "no block has a cache"), ("attention_mask", "no block takes input_ids")):
        folder = tmp_path / name
        folder.mkdir()
        graph = helper.make_graph(
            [helper.make_node("Cast", [name], ["logits"], to=TensorProto.FLOAT)],
            "block",
            [value(name, TensorProto.INT64, ["batch", "positions"])],
            [value("logits", TensorProto.FLOAT, ["batch", "positions", 8])],
        )
        (folder / "block_1.onnx").write_bytes(helper.make_model(graph, ir_version=8).SerializeToString())
        assert run(["--", str(folder)]) == 2
        assert f"block_1.onnx: {said}" in capsys.readouterr().err


def test_dimensions_that_a_file_does_not_tell_follow_from_its_operators(
    with_weights_beside: Path, tmp_path: Path
) -> None:
    """Where tensors travel between stages their rank has to be known, and exporters leave it out."""

    def silent(model: ModelProto) -> None:
        for one in model.graph.output:
            one.type.tensor_type.ClearField("shape")

    folder = copied(with_weights_beside, tmp_path / "silent", altered("block_1.onnx", silent))
    declared, found = (read_onnx_file(one, "block_1.onnx", 1).signature for one in (with_weights_beside, folder))
    assert [tensor.rank for tensor in found.outputs] == [tensor.rank for tensor in declared.outputs]
