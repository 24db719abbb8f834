"""A checkpoint becomes a block folder: the story first, then every number in it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import Precision, hadamard_size
from blockrelay.errors import UsageError
from blockrelay_converter.convert import convert
from blockrelay_converter.quantisation.columns import quantise_columns
from blockrelay_converter.quantisation.groups import group_values, quantise_groups
from blockrelay_converter.quantisation.hadamard import spread_inputs
from tests.support.models.checkpoints import CHAT_TEMPLATE, write_checkpoint
from tests.support.models.hadamard import hadamard


def converted(checkpoint: Path, out: Path, precision: Precision = "w8a8", **options: Any) -> Manifest:
    options = {"name": "tiny", "answers": False, **options}
    return convert(checkpoint, out, precision=precision, report=lambda *_: None, **options)


def opened(out: Path) -> BlockFolder:
    return open_block_folder(out, known_answers=False)


def source_tensors(checkpoint: Path) -> dict[str, NDArray[np.float32]]:
    """The tensors of a float32 or bfloat16 checkpoint, read a second way."""
    found: dict[str, NDArray[np.float32]] = {}
    for file in checkpoint.glob("*.safetensors"):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                first, last = (start + offset for offset in entry["data_offsets"])
                raw = content[first:last]
                if entry["dtype"] == "BF16":
                    raw = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))
                found[name] = np.frombuffer(raw, np.float32).reshape(entry["shape"])
    return found


def test_a_checkpoint_becomes_a_folder_that_workers_accept(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "my-model", seed=1, eos_ids=(2, 7))

    manifest = convert(checkpoint, tmp_path / "out", precision="w8a8", report=lambda *_: None)

    folder = open_block_folder(tmp_path / "out")  # insists on every hash and on a known answer per block
    assert folder.manifest == manifest
    assert manifest.exact
    assert manifest.model.name == "my-model"
    assert manifest.model.family == "llama"
    assert manifest.model.eos_ids == (2, 7)
    assert manifest.model.bos_id == 1
    assert (manifest.model.bos_token, manifest.model.eos_token) == ("<s>", "</s>")
    assert len({block.known_answer for block in manifest.blocks}) == manifest.model.blocks == 5
    assert folder.chat_template() == CHAT_TEMPLATE
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my-model", "out"]


def test_fp32_holds_the_checkpoints_own_numbers_transposed_and_fused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=2, dtype="bfloat16", shards=3, family="qwen2")
    source = source_tensors(checkpoint)
    converted(checkpoint, tmp_path / "out", "fp32")
    folder = opened(tmp_path / "out")

    assert not folder.manifest.exact
    np.testing.assert_array_equal(folder.tensors(1)["embedding"], source["model.embed_tokens.weight"])
    np.testing.assert_array_equal(folder.tensors(5)["norm_final"], source["model.norm.weight"])
    np.testing.assert_array_equal(folder.tensors(5)["head.w"], source["lm_head.weight"].T)
    for layer in range(4):
        tensors, prefix = folder.tensors(layer + 1), f"model.layers.{layer}."
        qkv = [source[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
        bias = [source[f"{prefix}self_attn.{name}_proj.bias"] for name in "qkv"]
        gate_up = [source[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        np.testing.assert_array_equal(tensors["qkv.w"], np.concatenate(qkv).T)
        np.testing.assert_array_equal(tensors["qkv.bias"], np.concatenate(bias))
        np.testing.assert_array_equal(tensors["o.w"], source[f"{prefix}self_attn.o_proj.weight"].T)
        np.testing.assert_array_equal(tensors["gate_up.w"], np.concatenate(gate_up).T)
        np.testing.assert_array_equal(tensors["down.w"], source[f"{prefix}mlp.down_proj.weight"].T)
        np.testing.assert_array_equal(tensors["norm_attention"], source[f"{prefix}input_layernorm.weight"])
        np.testing.assert_array_equal(tensors["norm_mlp"], source[f"{prefix}post_attention_layernorm.weight"])


def test_fp16_holds_them_rounded_once_and_what_is_added_and_scaled_by_as_it_is(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=2, family="qwen3")
    converted(checkpoint, tmp_path / "wide", "fp32")
    converted(checkpoint, tmp_path / "out", "fp16")
    folder, wide = opened(tmp_path / "out"), opened(tmp_path / "wide")
    assert not folder.manifest.exact and folder.manifest.precision == "fp16"
    for block in range(1, 6):
        for name, found in folder.tensors(block).items():
            expected = wide.tensors(block)[name]
            matrix = name.endswith(".w") or name == "embedding"
            assert found.dtype == (np.float16 if matrix else np.float32)
            np.testing.assert_array_equal(found, expected.astype(np.float16) if matrix else expected)
    # The graphs are those of fp32: who computes by them widens the weights.
    for kind in folder.manifest.graphs:
        assert folder.graph(kind) == wide.graph(kind)


def test_w8a8_quantises_each_output_channel_by_the_documented_formula(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=3, family="qwen3")
    source = source_tensors(checkpoint)
    converted(checkpoint, tmp_path / "out", basis="original")
    folder = opened(tmp_path / "out")

    down = source["model.layers.1.mlp.down_proj.weight"]
    size = hadamard_size(folder.model, "w8a8")
    assert size == 128
    spread = down.reshape(-1, size) @ hadamard(size).astype(np.float32) / size
    for block, name, weights in (
        (2, "down", spread_inputs(down, size)),
        (2, "qkv", np.concatenate([source[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"])),
        (5, "head", source["lm_head.weight"]),
    ):
        tensors = folder.tensors(block)
        scale = (np.abs(weights).max(axis=1) / np.float32(127)).astype(np.float32)
        np.testing.assert_array_equal(tensors[f"{name}.scale"], scale)
        np.testing.assert_array_equal(tensors[f"{name}.q"], np.rint(weights / scale[:, None]).astype(np.int8).T)
        assert np.abs(tensors[f"{name}.q"].astype(int)).max() == 127
    np.testing.assert_allclose(spread_inputs(down, size), spread.reshape(down.shape), atol=1e-6 * np.abs(down).max())
    embedding = source["model.embed_tokens.weight"]
    np.testing.assert_array_equal(folder.tensors(1)["embedding"], embedding.astype(np.float16))
    np.testing.assert_array_equal(folder.tensors(3)["norm_q"], source["model.layers.2.self_attn.q_norm.weight"])


def test_w4a8_holds_groups_of_4_bits_and_the_embedding_and_norms_of_w8a8(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=3, family="qwen2")
    source = source_tensors(checkpoint)
    assert converted(checkpoint, tmp_path / "out", "w4a8").exact
    converted(checkpoint, tmp_path / "eight", basis="original")
    folder, eight = opened(tmp_path / "out"), opened(tmp_path / "eight")

    assert folder.manifest.graphs == {}
    for block in range(1, 6):
        ours, theirs = folder.tensors(block), eight.tensors(block)
        for name in ours.keys() & theirs.keys():
            np.testing.assert_array_equal(ours[name], theirs[name])
        assert {name.partition(".")[2] for name in ours} <= {"", "bias", "q4", "gs", "gm"}
    assert {"head.q4", "norm_final"} < folder.tensors(5).keys() and "embedding" in folder.tensors(1)
    for name, weights in (
        ("down", source["model.layers.1.mlp.down_proj.weight"]),
        ("gate_up", np.concatenate([source[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up")])),
    ):
        found = [np.asarray(folder.tensors(2)[f"{name}.{part}"]) for part in ("q4", "gs", "gm")]
        for ours, expected in zip(found, quantise_groups(weights), strict=True):
            np.testing.assert_array_equal(ours, expected)
        held = group_values(*found)
        assert np.linalg.norm(held - weights) < 0.08 * np.linalg.norm(weights)


def test_quantising_rounds_halves_to_even_and_survives_zero_and_tiny_columns() -> None:
    weights = np.array([[127, 2.5, 3.5, -2.5], [0, 0, 0, 0], [1e-45, -1e-45, 0, 0], [-3, 3, 0, 1]], np.float32)
    q, scale = quantise_columns(weights)
    assert q.T.tolist()[:2] == [[127, 2, 4, -2], [0, 0, 0, 0]]
    assert scale.tolist()[:3] == [1.0, 1.0, 1.0]
    assert q.T.tolist()[3] == [-127, 127, 0, 42]


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=4, tie_word_embeddings=True)
    converted(checkpoint, tmp_path / "out", "fp32")
    folder = opened(tmp_path / "out")
    np.testing.assert_array_equal(folder.tensors(5)["head.w"], folder.tensors(1)["embedding"].T)


def test_sharding_and_spelling_make_no_difference(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    plain = write_checkpoint(tmp_path / "a", seed=5, rope_scaling=scaling)
    other = write_checkpoint(tmp_path / "b", seed=5, rope_scaling=scaling, shards=4, new_spelling=True)
    first, second = converted(plain, tmp_path / "out-a"), converted(other, tmp_path / "out-b")
    assert first.model_hash == second.model_hash
    assert (tmp_path / "out-a/manifest.json").read_bytes() == (tmp_path / "out-b/manifest.json").read_bytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_storage_type_converts_to_its_own_values(dtype: Any, tmp_path: Path) -> None:
    reference = source_tensors(write_checkpoint(tmp_path / "reference", seed=6))["lm_head.weight"]
    converted(write_checkpoint(tmp_path / "c", seed=6, dtype=dtype), tmp_path / "out", "fp32")
    head = opened(tmp_path / "out").tensors(5)["head.w"].T
    precision = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert (np.abs(head - reference) <= np.abs(reference) * precision + 2.0**-25).all()
    assert (head == reference).all() == (dtype == "float32")


def test_a_shorter_context_makes_shorter_tables_and_the_same_blocks(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", seed=7)
    whole, short = converted(checkpoint, tmp_path / "a"), converted(checkpoint, tmp_path / "b", max_position=100)
    assert (whole.model.max_position, short.model.max_position) == (512, 100)
    for ours, theirs in zip(opened(tmp_path / "b").rotary(), opened(tmp_path / "a").rotary(), strict=True):
        np.testing.assert_array_equal(ours, theirs[:100])
    assert whole.files["blocks/block_1.bin"] == short.files["blocks/block_1.bin"]


def test_a_model_without_a_tokenizer_converts_for_token_ids_only(tmp_path: Path) -> None:
    converted(write_checkpoint(tmp_path / "c", seed=8, tokenizer=False), tmp_path / "out")
    folder = opened(tmp_path / "out")
    assert folder.tokenizer_path is None
    assert folder.chat_template() is None


@pytest.mark.parametrize(("precision", "answers"), [("w8a8", False), ("w4a8", True), ("fp32", True), ("fp16", True)])
def test_progress_adds_up_to_the_whole(precision: Precision, answers: bool, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    checkpoint = write_checkpoint(tmp_path / "c", seed=9)

    def report(what: str, done: int, total: int) -> None:
        calls.append((what, done, total))

    convert(checkpoint, tmp_path / "out", precision=precision, report=report, answers=answers)
    assert {total for _, _, total in calls} == {sum(done for _, done, _ in calls)}
    steps = [f"block_{i}" for i in range(1, 6)]
    if answers and precision == "w4a8":
        steps += ["known answers", *(f"known answer of {step}" for step in steps)]
    assert list(dict.fromkeys(what for what, _, _ in calls)) == steps


class TestThePlaceOfTheOutput:
    def test_an_empty_folder_is_used(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        converted(write_checkpoint(tmp_path / "c", seed=1), tmp_path / "out")
        opened(tmp_path / "out")

    def test_parents_are_made(self, tmp_path: Path) -> None:
        converted(write_checkpoint(tmp_path / "c", seed=1), tmp_path / "some/where/out")
        opened(tmp_path / "some/where/out")

    def test_what_is_there_is_not_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/mine.txt").write_text("mine")
        checkpoint = write_checkpoint(tmp_path / "c", seed=1)
        with pytest.raises(UsageError, match="exists and is not empty"):
            converted(checkpoint, tmp_path / "out")
        with pytest.raises(UsageError, match="is not a block folder: --force does not replace it"):
            converted(checkpoint, tmp_path / "out", force=True)
        assert (tmp_path / "out/mine.txt").read_text() == "mine"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "out"]

    def test_force_replaces_a_block_folder(self, tmp_path: Path) -> None:
        converted(write_checkpoint(tmp_path / "c", seed=1), tmp_path / "out")
        second = converted(write_checkpoint(tmp_path / "d", seed=2), tmp_path / "out", force=True)
        assert opened(tmp_path / "out").manifest == second
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d", "out"]

    def test_a_file_or_a_link_is_refused(self, tmp_path: Path) -> None:
        checkpoint = write_checkpoint(tmp_path / "c", seed=1)
        (tmp_path / "file").write_text("")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        for place in ("file", "link"):
            with pytest.raises(UsageError, match="exists and is not a folder"):
                converted(checkpoint, tmp_path / place, force=True)


ROWS = st.tuples(st.integers(1, 5), st.integers(1, 40)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.floats(-(2.0**99), 2.0**99, width=32))
)


@given(weights=ROWS)
def test_a_quantised_weight_is_within_half_a_step_of_its_value(weights: NDArray[np.float32]) -> None:
    q, scale = quantise_columns(weights)
    assert q.shape == weights.T.shape
    assert (scale > 0).all()
    assert (np.abs(q.astype(int)) <= 127).all()
    error = np.abs(q.T.astype(np.float64) * scale[:, None] - weights)
    # half a step, and the roundings of scale and quotient; where the scale itself underflows nothing is left
    tiny = scale < np.finfo(np.float32).tiny
    assert (error <= scale[:, None] * np.where(tiny[:, None], 128, 0.50002)).all()
