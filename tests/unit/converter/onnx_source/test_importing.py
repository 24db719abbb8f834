"""ONNX blocks of all exporters and families become block folders with their weights, in their own precision."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from blockrelay.errors import UsageError
from blockrelay_converter.onnx_source.importing import ImportOptions, import_blocks
from blockrelay_converter.quantisation.groups import group_values
from blockrelay_worker.offline.onnx_blocks.splitting.split import run as split
from tests.support.models.altered_blocks import altered, copied
from tests.support.models.genai_decoder import Packing, genai_decoder
from tests.support.models.imported import imported
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.models.whole_decoders import SMALL, dynamo_decoder, optimum_decoder, saved

pytestmark = pytest.mark.onnx_blocks

TWO = replace(SMALL, layers=2)
WIDENED = "are widened to"
#: Exports, and the family and precision that must come of them.
EXPORTS: dict[str, tuple[Callable[[], ModelProto], str, str]] = {
    "optimum": (lambda: optimum_decoder(TWO, float32=True), "llama", "fp32"),
    "optimum, Qwen2": (lambda: optimum_decoder(replace(TWO, qkv_bias=True)), "qwen2", "fp16"),
    "optimum, Qwen3": (lambda: optimum_decoder(replace(TWO, qk_norm=True)), "qwen3", "fp16"),
    "optimum, products joined": (lambda: optimum_decoder(replace(TWO, fused=True)), "llama", "fp16"),
    "dynamo": (lambda: dynamo_decoder(TWO), "llama", "fp32"),
    "dynamo, biases and norms": (lambda: dynamo_decoder(replace(TWO, qkv_bias=True, qk_norm=True)), "qwen3", "fp32"),
    "genai": (lambda: genai_decoder(TWO), "llama", "fp32"),
    "genai, Qwen2": (lambda: genai_decoder(replace(TWO, qkv_bias=True)), "qwen2", "fp32"),
    "genai, Qwen3": (lambda: genai_decoder(replace(TWO, qk_norm=True)), "qwen3", "fp32"),
    "genai, float16": (lambda: genai_decoder(TWO, float16=True), "llama", "fp16"),
    "genai, int4 as w4a8": (lambda: genai_decoder(TWO, int4=True, float16=True), "llama", "w4a8"),
    "genai, int4 of float32": (lambda: genai_decoder(TWO, int4=True), "llama", "fp32"),
    "genai, int4 with zero points": (
        lambda: genai_decoder(TWO, packing=Packing(zero_points=True), float16=True),
        "llama",
        "fp16",
    ),
    "genai, int4 by 16": (lambda: genai_decoder(TWO, packing=Packing(group=16), float16=True), "llama", "fp16"),
    "genai, int8": (lambda: genai_decoder(TWO, packing=Packing(bits=8)), "llama", "fp32"),
    "genai, int8 with zero points": (
        lambda: genai_decoder(TWO, packing=Packing(bits=8, zero_points=True)),
        "llama",
        "fp32",
    ),
}


def blocks_of(model: ModelProto, folder: Path) -> Path:
    path, out = saved(model, folder / "model" / "model.onnx", external=True), folder / "blocks"
    assert split([str(path), str(out)]) == 0
    return out


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_is_imported_in_its_own_precision(tmp_path: Path, name: str) -> None:
    make, family, precision = EXPORTS[name]
    found = imported(blocks_of(make(), tmp_path), tmp_path / "out")
    assert (found.folder.model.family, found.folder.manifest.precision) == (family, precision)
    assert found.folder.model.qkv_bias == ("Qwen2" in name or "biases" in name)
    assert found.folder.model.rms_norm_eps == pytest.approx(TWO.epsilon, rel=1e-6)
    assert [block.block for block in found.result.compared] == ["block_1", "block_2", "block_3"]
    assert all(0 <= error <= 0.3 for block in found.result.compared for error in block.errors.values())
    is_widened = "int" in name and precision != "w4a8"
    assert any(WIDENED in note for note in found.result.notes) == is_widened
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks", "model", "out"]


def test_all_blocks_in_one_file_are_imported_too(tmp_path: Path) -> None:
    saved(genai_decoder(TWO), tmp_path / "whole" / "block_1.onnx", external=True)
    found = imported(tmp_path / "whole", tmp_path / "out")
    assert found.folder.model.layers == 2


def test_weights_are_those_of_the_export_bit_by_bit(tmp_path: Path) -> None:
    model = ReferenceModel(layers=2, qkv_bias=True)
    found = imported(write_reference_blocks(tmp_path / "blocks", model), tmp_path / "out")
    first, head = found.folder.tensors(1), found.folder.tensors(3)
    weights = {**model.weights(1), **model.weights(3)}
    at = "model.layers.0"
    qkv = [f"{at}.self_attn.{part}_proj" for part in "qkv"]
    expected = {
        "embedding": weights["model.embed_tokens.weight"],
        "norm_attention": weights[f"{at}.input_layernorm.weight"],
        "qkv.w": np.concatenate([weights[f"{name}.weight"] for name in qkv], axis=1),
        "qkv.bias": np.concatenate([weights[f"{name}.bias"] for name in qkv]),
        "o.w": weights[f"{at}.self_attn.o_proj.weight"],
        "norm_mlp": weights[f"{at}.post_attention_layernorm.weight"],
        "gate_up.w": np.concatenate([weights[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up")], axis=1),
        "down.w": weights[f"{at}.mlp.down_proj.weight"],
    }
    assert first.keys() == expected.keys()
    assert all(np.array_equal(first[name], expected[name]) for name in expected)
    assert np.array_equal(head["head.w"], weights["lm_head.weight"])
    assert np.array_equal(head["norm_final"], weights["model.norm.weight"])
    cos, sin = found.folder.rotary()
    angles = np.arange(len(cos), dtype=np.float32)[:, None] * model.frequencies()
    assert np.array_equal(cos, np.cos(angles.astype(np.float64)).astype(np.float32))
    assert np.array_equal(sin, np.sin(angles.astype(np.float64)).astype(np.float32))


def test_4_bits_in_groups_of_32_are_kept_as_they_are_stored(tmp_path: Path) -> None:
    model = genai_decoder(TWO, int4=True, float16=True)
    found = imported(blocks_of(model, tmp_path), tmp_path / "out")
    tensors = found.folder.tensors(1)
    stored = {str(tensor.name): numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    packed, scales = (stored[f"model.layers.0.mlp.down_proj.MatMul.weight_{part}"] for part in ("q4", "scales"))
    assert np.array_equal(tensors["down.q4"], packed.reshape(len(packed), -1).T)
    values = group_values(tensors["down.q4"], tensors["down.gs"], tensors["down.gm"])
    numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], 32).astype(np.float32) - 8
    widened = numbers * scales.reshape(*packed.shape[:2], 1).astype(np.float32)
    assert np.array_equal(values, widened.reshape(values.shape))


def test_gate_is_what_silu_follows_whatever_the_weights_are_called(tmp_path: Path) -> None:
    """Weights of gate and up in each other's place are another model, which is imported as the graph computes it."""

    def swap(model: ModelProto) -> None:
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                for one, other in (("gate", "up"), ("up", "gate")):
                    if name.endswith(f"mlp.{one}_proj.weight"):
                        node.input[index] = name.replace(f".{one}_", f".{other}_")
                        break

    model = ReferenceModel(layers=2)
    blocks = write_reference_blocks(tmp_path / "blocks", model)
    swapped = copied(blocks, tmp_path / "swapped", altered("block_2.onnx", swap))
    found = imported(swapped, tmp_path / "out")
    names = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("up", "gate")]
    weights = np.concatenate([model.weights(2)[name] for name in names], axis=1)
    assert np.array_equal(found.folder.tensors(2)["gate_up.w"], weights)


@pytest.mark.parametrize("precision", ["fp32", "w8a8", "w4a8", "w8a8,block_3=fp32"])
def test_another_precision_is_converted_in_the_same_go(tmp_path: Path, precision: str) -> None:
    blocks = write_reference_blocks(tmp_path / "blocks", ReferenceModel(layers=2))
    found = imported(blocks, tmp_path / "out", precision=precision)
    assert found.folder.manifest.precision == precision
    assert found.result.stored == "fp16" and len(found.result.compared) == 3
    assert any("is not measured" in note for note in found.result.notes) == (precision != "fp32")
    assert not (tmp_path / "out" / "floats").exists()
    listed = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert listed == {"manifest.json", *found.folder.manifest.files}


def test_what_an_ended_run_has_written_is_not_written_again(tmp_path: Path) -> None:
    blocks = write_reference_blocks(tmp_path / "blocks", ReferenceModel(layers=2))
    left = tmp_path / ".out.unfinished"

    def end(options: ImportOptions) -> None:
        def tell(step: object) -> None:
            if (left / "blocks" / "block_1.bin").exists():
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            import_blocks(options, tell)

    end(ImportOptions(folder=blocks, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    inode = (left / "blocks" / "block_1.bin").stat().st_ino
    with pytest.raises(UsageError, match="was left by a run about something else"):
        imported(blocks, tmp_path / "out", precision="w8a8")
    found = imported(blocks, tmp_path / "out")
    assert (tmp_path / "out" / "blocks" / "block_1.bin").stat().st_ino == inode
    assert found.folder.manifest.precision == "fp16" and not left.exists()
