"""Checkpoints that are incomplete, damaged or not what they say: one line that names the tensor or the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.model import Precision
from blockrelay.errors import UnsupportedModel, UsageError
from blockrelay_converter.checkpoint.source import read_source
from blockrelay_converter.convert import convert
from tests.support.models.checkpoints import StorageType, write_checkpoint, write_safetensors
from tests.support.models.hub_cache import cached
from tests.support.models.lfs import POINTER

Tensors = dict[str, NDArray[Any]]
DOWN = "model.layers.1.mlp.down_proj.weight"


def refuse(checkpoint: Path, **options: Any) -> UsageError:
    """Convert, which must fail and leave nothing; the error."""
    before = sorted(checkpoint.parent.iterdir())
    options = {"precision": "w8a8", "answers": False, **options}
    with pytest.raises(UsageError) as caught:
        convert(checkpoint, checkpoint.parent / "out", report=lambda *_: None, **options)
    assert sorted(checkpoint.parent.iterdir()) == before
    assert "\n" not in str(caught.value)
    return caught.value


def rewrite(checkpoint: Path, change: Callable[[Tensors], None]) -> Path:
    """Change the tensors of a float32 checkpoint of one file."""
    file = checkpoint / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors: Tensors = {}
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            first, last = (start + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(content[first:last], np.float32).reshape(entry["shape"]).copy()
    change(tensors)
    kinds: dict[str, StorageType] = {"float64": "float64", "int64": "int64", "bool": "bool"}
    write_safetensors(file, {name: (kinds.get(array.dtype.name, "float32"), array) for name, array in tensors.items()})
    return checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "c", seed=1, num_hidden_layers=2, tokenizer=False)


@pytest.mark.parametrize(
    "name",
    [
        DOWN,
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.k_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(checkpoint: Path, name: str) -> None:
    rewrite(checkpoint, lambda tensors: tensors.__delitem__(name))
    remedy = {"lm_head.weight": ': where the head is the embedding, config.json must say "tie_word_embeddings": true'}
    assert str(refuse(checkpoint)) == f"tensor {name} is missing from the checkpoint{remedy.get(name, '')}"


def test_a_tensor_of_the_wrong_shape_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({DOWN: tensors[DOWN].T.copy()}))
    assert str(refuse(checkpoint)) == f"tensor {DOWN} has shape [128, 64], but config.json asks for [64, 128]"


def test_a_tensor_we_would_ignore_is_refused(checkpoint: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    rewrite(checkpoint, lambda tensors: tensors.update({bias: np.zeros(64, np.float32)}))
    error = refuse(checkpoint)
    assert isinstance(error, UnsupportedModel)
    assert error.field == bias
    assert bias in str(error)


def test_floats_we_would_ignore_are_refused_whatever_their_type(checkpoint: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    rewrite(checkpoint, lambda tensors: tensors.update({bias: np.zeros(64)}))
    assert f"tensor {bias} is not part of a llama model we know" in str(refuse(checkpoint))


def test_leftovers_of_old_exports_are_no_obstacle(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1, tie_word_embeddings=True, tokenizer=False)
    leftovers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float64),
        "lm_head.weight": np.zeros((512, 64), np.float64),  # tied: transformers uses the embedding
        "model.position_ids": np.arange(8),
        "model.layers.0.self_attn.mask": np.zeros((8, 8), np.bool_),
    }
    rewrite(checkpoint, lambda tensors: tensors.update(leftovers))
    convert(checkpoint, tmp_path / "out", precision="w8a8", report=lambda *_: None, answers=False)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [DOWN, "model.embed_tokens.weight", "model.norm.weight"])
def test_values_that_are_not_finite_are_refused(checkpoint: Path, name: str, value: float) -> None:
    rewrite(checkpoint, lambda tensors: tensors[name].__setitem__(3, value))
    assert f"tensor {name} holds values that are not finite" in str(refuse(checkpoint))


def test_an_embedding_beyond_float16_needs_fp32(checkpoint: Path, tmp_path: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors["model.embed_tokens.weight"].__setitem__(3, 70000.0))
    assert "tensor model.embed_tokens.weight holds values beyond float16" in str(refuse(checkpoint))
    convert(checkpoint, tmp_path / "out", precision="fp32", report=lambda *_: None)


@pytest.mark.parametrize("precision", ["fp16", "w4a8"])
def test_weights_beyond_float16_are_for_neither_fp16_nor_w4a8(
    checkpoint: Path, tmp_path: Path, precision: Precision
) -> None:
    rewrite(checkpoint, lambda tensors: tensors[DOWN].__setitem__((3, 2), -70000.0))
    with pytest.raises(UsageError, match=f"tensor {DOWN} holds values beyond float16; convert with --precision fp32"):
        convert(checkpoint, tmp_path / "out", precision=precision, report=lambda *_: None)
    assert not (tmp_path / "out").exists()


def edit_header(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = checkpoint / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "F64"}, f"tensor {DOWN} is stored as F64"),
        ({"dtype": "F8_E4M3"}, f"tensor {DOWN} is stored as F8_E4M3"),
        ({"data_offsets": [0, 1 << 50]}, f"tensor {DOWN} lies outside model.safetensors"),
        ({"data_offsets": [0, 4]}, f"tensor {DOWN} lies outside model.safetensors"),
        ({"data_offsets": [8]}, f"tensor {DOWN} lies outside model.safetensors"),
        ({"data_offsets": [-4, 0]}, "data_offsets must be an integer of at least 0"),
        ({"shape": "big"}, "shape must be a list"),
    ],
)
def test_a_header_that_lies_is_refused(checkpoint: Path, change: dict[str, Any], message: str) -> None:
    edit_header(checkpoint, lambda header: header[DOWN].update(change))
    assert message in str(refuse(checkpoint))


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_a_file_that_is_cut_short_is_refused(checkpoint: Path, keep: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors" in str(refuse(checkpoint))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    assert "holds no config.json" in str(refuse(tmp_path / "c"))
    assert "is not a folder" in str(refuse(tmp_path / "nowhere"))
    checkpoint = write_checkpoint(tmp_path / "d", seed=1)
    (checkpoint / "model.safetensors").unlink()
    assert "holds neither model.safetensors nor model.safetensors.index.json" in str(refuse(checkpoint))


def test_a_tokenizer_in_a_form_that_is_not_read_is_refused_and_none_is_not(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.model").write_bytes(b"")
    message = str(refuse(checkpoint))
    assert "has tokenizer.model and no tokenizer.json, which alone is read: AutoTokenizer." in message
    assert message.endswith("; without tokenizer.model the model takes and gives token ids")
    (checkpoint / "tokenizer.model").unlink()
    convert(checkpoint, tmp_path / "out", precision="w8a8", report=lambda *_: None, answers=False)


class TestOtherFolders:
    """What people give in place of a checkpoint: each is named, with what to do instead."""

    @pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json", "generation_config.json"])
    def test_a_pointer_of_git_lfs(self, checkpoint: Path, file: str) -> None:
        (checkpoint / file).write_bytes(POINTER)
        said = f"{checkpoint / file} is a Git LFS pointer in place of the file: `git lfs pull` in the folder fetches it"
        assert str(refuse(checkpoint)) == said

    def test_a_pointer_in_place_of_what_is_not_read_is_no_obstacle(self, checkpoint: Path, tmp_path: Path) -> None:
        (checkpoint / "pytorch_model.bin").write_bytes(POINTER)
        (checkpoint / "consolidated.safetensors").write_bytes(POINTER)
        convert(checkpoint, tmp_path / "out", precision="w8a8", report=lambda *_: None, answers=False)

    @pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
    def test_weights_of_pytorch(self, checkpoint: Path, file: str) -> None:
        (checkpoint / "model.safetensors").rename(checkpoint / file)
        message = str(refuse(checkpoint))
        assert message.startswith(f"{checkpoint / file} is a pickle of PyTorch")
        assert "save_pretrained(OUT)" in message

    def test_safetensors_in_another_layout(self, checkpoint: Path) -> None:
        (checkpoint / "model.safetensors").rename(checkpoint / "consolidated.safetensors")
        assert "model.safetensors.index.json, but consolidated.safetensors: download all" in str(refuse(checkpoint))

    @pytest.mark.parametrize("place", ["c/tiny.Q4_K_M.gguf", "c"])
    def test_gguf(self, checkpoint: Path, place: str) -> None:
        (checkpoint / "model.safetensors").rename(checkpoint / "tiny.Q4_K_M.gguf")
        message = str(refuse(checkpoint.parent / place)) if place == "c" else self.refused(checkpoint.parent / place)
        assert message.startswith(f"{checkpoint / 'tiny.Q4_K_M.gguf'} is GGUF")
        assert "convert the checkpoint with safetensors that it was made of" in message

    @pytest.mark.parametrize("with_config", [False, True])
    def test_an_adapter(self, checkpoint: Path, with_config: bool) -> None:
        (checkpoint / "model.safetensors").rename(checkpoint / "adapter_model.safetensors")
        (checkpoint / "adapter_config.json").write_text('{"base_model_name_or_path": "acme/tiny", "r": 8}')
        if not with_config:
            (checkpoint / "config.json").unlink()
        message = str(refuse(checkpoint))
        assert message.startswith(f"{checkpoint} is an adapter of acme/tiny, not a model: put it into the model with")

    def test_the_folder_of_a_repository_in_the_cache(self, checkpoint: Path, tmp_path: Path) -> None:
        snapshot = cached(checkpoint, tmp_path / "hub")
        repository = snapshot.parent.parent
        (repository / "snapshots" / "ffff").mkdir()
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(snapshot.name)
        assert self.refused(repository).endswith(f"cache, not a checkpoint: give {snapshot}")
        (repository / "refs" / "main").unlink()
        assert self.refused(repository).endswith("give " + str(repository / "snapshots" / "ffff"))
        made = convert(snapshot, tmp_path / "out", precision="w8a8", report=lambda *_: None, answers=False)
        assert made.model.name == "acme/tiny-1b"

    def test_the_name_of_a_model_on_the_hub(self) -> None:
        message = self.refused(Path("acme/tiny-1b"))
        assert message.startswith("acme/tiny-1b is not a folder: `hf download acme/tiny-1b`")

    def refused(self, place: Path) -> str:
        """The message for what is no folder of its own."""
        with pytest.raises(UsageError) as caught:
            read_source(place)
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_say_by_their_names_that_they_are_all(shards: int, tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", seed=1, tokenizer=False)
    checkpoint = write_checkpoint(tmp_path / "c", seed=1, tokenizer=False, shards=shards)
    if shards == 1:
        (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00001.safetensors")
    else:
        (checkpoint / "model.safetensors.index.json").unlink()
    made = [
        convert(each, tmp_path / f"out-{each.name}", precision="w8a8", report=lambda *_: None, name="x", answers=False)
        for each in (plain, checkpoint)
    ]
    assert made[0] == made[1]


def test_without_an_index_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1, tokenizer=False, shards=3)
    (checkpoint / "model.safetensors.index.json").unlink()
    (checkpoint / "model-00002-of-00003.safetensors").unlink()
    assert str(refuse(checkpoint)).startswith("model-00002-of-00003.safetensors is missing")


class TestShards:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        return write_checkpoint(tmp_path / "c", seed=1, num_hidden_layers=2, tokenizer=False, shards=3)

    def edit_index(self, checkpoint: Path, name: str, file: str) -> None:
        index = checkpoint / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"][name] = file
        index.write_text(json.dumps(content))

    def test_a_missing_shard_is_named(self, sharded: Path) -> None:
        (sharded / "model-00002-of-00003.safetensors").unlink()
        assert "model-00002-of-00003.safetensors is missing" in str(refuse(sharded))

    def test_a_tensor_that_is_not_where_the_index_says_is_named(self, sharded: Path) -> None:
        self.edit_index(sharded, "model.norm.extra", "model-00001-of-00003.safetensors")
        assert "tensor model.norm.extra is not in model-00001-of-00003.safetensors" in str(refuse(sharded))

    @pytest.mark.parametrize("file", ["../c/model-00001-of-00003.safetensors", "/etc/passwd", "", "a\\b"])
    def test_a_shard_outside_the_folder_is_refused(self, sharded: Path, file: str) -> None:
        self.edit_index(sharded, "model.norm.weight", file)
        assert "is not a plain file name" in str(refuse(sharded))


def test_widths_that_cannot_be_cut_into_groups_are_refused_in_w4a8_alone(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=1, intermediate_size=136)
    error = refuse(checkpoint, precision="w4a8")
    assert str(error) == "w4a8 needs inputs in multiples of 32, and down has 136; use w8a8"
    convert(checkpoint, tmp_path / "out", precision="w8a8", report=lambda *_: None, answers=False)
