"""A folder of ONNX blocks as people own them: a small Llama with the file and tensor names of a real export.

`python -m tests.support.models.reference_blocks OUT [--layers 32] [--external] [--full-size]` writes block_1.onnx
(embedding, mask, rotary tables, layer 0), a file for each further layer, and one with norm and head. The operators are
those of an export by optimum, in its order as far as that means something; the weights are random, by a seed. Written
with `onnx` alone. `--full-size`: 16 GB with the shapes of Llama-3.1-8B, one block in memory at a time.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

#: What masks have where nobody may look: the least of float16.
_MASKED = float(np.finfo(np.float16).min)
_OPSET, _IR_VERSION = 17, 8
MASK = "/model/ScatterND_output_0"
COS, SIN = "/model/layers.0/self_attn/Unsqueeze_6_output_0", "/model/layers.0/self_attn/Unsqueeze_7_output_0"
_B, _S, _P, _T = "batch_size", "sequence_length", "past_sequence_length", "past_sequence_length + sequence_length"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """The reference is Llama-3.1-8B; this is its shape in small. Layers of 64 columns make 33 files of 70 kB."""

    layers: int = 32
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 128
    vocabulary: int = 512
    theta: float = 500000.0
    epsilon: float = 1e-5
    seed: int = 1
    qkv_bias: bool = False
    """As of Qwen2."""
    qk_norm: bool = False
    """As of Qwen3."""
    fused: bool = False
    """One product for queries, keys and values, and one for gate and up."""

    def weights(self, block: int) -> dict[str, NDArray[np.float16]]:
        """Of block 1 to layers + 1, by the names of the export. A matrix is [inputs, outputs]."""
        random = np.random.default_rng([self.seed, block])

        def matrix(rows: int, columns: int) -> NDArray[np.float16]:
            return (random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float16)

        def norm() -> NDArray[np.float16]:
            return random.uniform(0.5, 1.5, self.hidden).astype(np.float16)

        if block > self.layers:
            return {"model.norm.weight": norm(), "lm_head.weight": matrix(self.hidden, self.vocabulary)}
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = {
            "input_layernorm.weight": norm(),
            "self_attn.q_proj.weight": matrix(self.hidden, queries),
            "self_attn.k_proj.weight": matrix(self.hidden, keys),
            "self_attn.v_proj.weight": matrix(self.hidden, keys),
            "self_attn.o_proj.weight": matrix(queries, self.hidden),
            "post_attention_layernorm.weight": norm(),
            "mlp.gate_proj.weight": matrix(self.hidden, self.mlp),
            "mlp.up_proj.weight": matrix(self.hidden, self.mlp),
            "mlp.down_proj.weight": matrix(self.mlp, self.hidden),
        }
        if self.qkv_bias:
            for part, columns in (("q", queries), ("k", keys), ("v", keys)):
                parts[f"self_attn.{part}_proj.bias"] = random.standard_normal(columns).astype(np.float16)
        if self.qk_norm:
            for part in ("q", "k"):
                parts[f"self_attn.{part}_norm.weight"] = random.uniform(0.5, 1.5, self.head_dim).astype(np.float16)
        found = {f"model.layers.{block - 1}.{name}": value for name, value in parts.items()}
        if block == 1:
            found["model.embed_tokens.weight"] = random.standard_normal((self.vocabulary, self.hidden)).astype(
                np.float16
            )
        return found

    def frequencies(self) -> NDArray[np.float32]:
        """Of the rotation, one for each pair of columns of a head."""
        return (self.theta ** -(np.arange(0, self.head_dim, 2) / self.head_dim)).astype(np.float32)


@dataclass(slots=True)
class _Block:
    """The graph of one block while it is written. A value is named after its node: `/model/Add_output_0`."""

    model: ReferenceModel
    index: int
    nodes: list[NodeProto] = field(default_factory=list[NodeProto])
    constants: dict[str, TensorProto] = field(default_factory=dict[str, TensorProto])
    inputs: list[ValueInfoProto] = field(default_factory=list[ValueInfoProto])
    outputs: list[ValueInfoProto] = field(default_factory=list[ValueInfoProto])

    def input(self, name: str, dims: Sequence[int | str], kind: int = TensorProto.FLOAT16) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, list(dims)))
        return name

    def output(self, name: str, dims: Sequence[int | str]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT16, list(dims)))

    def add(self, kind: str, name: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        made = output or f"{name}_output_0"
        self.nodes.append(helper.make_node(kind, list(inputs), [made], name=name, **attributes))
        return made

    def constant(self, name: str, value: Any, dtype: Any = np.int64) -> str:
        self.constants.setdefault(name, numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def length(self, name: str, of: str, axis: int) -> str:
        """How long `of` is along an axis, as int64 [1]."""
        shape = self.add("Shape", f"{name}/Shape", of)
        return self.add("Gather", f"{name}/Gather", shape, self.constant(f"axis_{axis}", [axis]), axis=0)

    def encoded(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, f"block_{self.index}", self.inputs, self.outputs, list(self.constants.values())
        )
        return helper.make_model(
            graph,
            producer_name="reference",
            ir_version=_IR_VERSION,
            opset_imports=[helper.make_opsetid("", _OPSET)],
        )


def reference_block(model: ReferenceModel, index: int) -> onnx.ModelProto:
    """Block `index`, 1 to layers + 1."""
    block = _Block(model, index)
    for name, value in model.weights(index).items():
        block.constant(name, value, np.float16)
    layer, hidden_dims = index - 1, (_B, _S, model.hidden)
    if index == 1:
        hidden, mask, cos, sin = _first_inputs(block)
    else:
        hidden = f"/model/layers.{layer - 1}/Add_1_output_0"
        if index > model.layers:
            block.input(hidden, hidden_dims)
            normed = _norm(block, "/model/norm", hidden, "model.norm.weight")
            block.add("MatMul", "/lm_head/MatMul", normed, "lm_head.weight", output="logits")
            block.output("logits", (_B, _S, model.vocabulary))
            return block.encoded()
        mask = block.input(MASK, (_B, 1, _S, _T))
        cos, sin = (block.input(name, (_B, 1, _S, model.head_dim)) for name in (COS, SIN))
        block.input(hidden, hidden_dims)
    for half in ("key", "value"):
        block.input(f"past_key_values.{layer}.{half}", (_B, model.kv_heads, _P, model.head_dim))
    if index == 1:
        mask = _mask(block)
        block.output(mask, (_B, 1, _S, _T))
    made = _layer(block, layer, hidden, mask, cos, sin)
    block.output(made, hidden_dims)
    if index == 1:
        for name in (cos, sin):
            block.output(name, (_B, 1, _S, model.head_dim))
    for half in ("key", "value"):
        block.output(f"present.{layer}.{half}", (_B, model.kv_heads, _T, model.head_dim))
    return block.encoded()


def _first_inputs(block: _Block) -> tuple[str, str, str, str]:
    """What the request brings, and of it the embedded tokens, the name of the mask (made later), cos and sin."""
    block.input("input_ids", (_B, _S), TensorProto.INT64)
    block.input("attention_mask", (_B, _T), TensorProto.INT64)
    block.input("position_ids", (_B, _S), TensorProto.INT64)
    hidden = block.add("Gather", "/model/embed_tokens/Gather", "model.embed_tokens.weight", "input_ids")
    at = "/model/rotary_emb"
    frequencies = block.constant("rotary_emb.inv_freq", block.model.frequencies()[None, :, None], np.float32)
    places = block.add("Unsqueeze", f"{at}/Unsqueeze", "position_ids", block.constant("axes_1", [1]))
    places = block.add("Cast", f"{at}/Cast", places, to=TensorProto.FLOAT)
    angles = block.add("MatMul", f"{at}/MatMul", frequencies, places)  # [B, head_dim / 2, S]
    angles = block.add("Transpose", f"{at}/Transpose", angles, perm=[0, 2, 1])
    angles = block.add("Concat", f"{at}/Concat", angles, angles, axis=-1)
    for kind, name in (("Cos", COS), ("Sin", SIN)):
        table = block.add("Cast", f"{at}/{kind}/Cast", block.add(kind, f"{at}/{kind}", angles), to=TensorProto.FLOAT16)
        block.add("Unsqueeze", name.removesuffix("_output_0"), table, block.constant("axes_1", [1]))
    return hidden, MASK, COS, SIN


def _mask(block: _Block) -> str:
    """[B, 1, S, T]: 0 where a token may look, the least number where it is later or padding."""
    new, total = block.length("/model/new", "input_ids", 1), block.length("/model/total", "attention_mask", 1)
    batch = block.length("/model/batch", "input_ids", 0)
    past = block.length("/model/past", "past_key_values.0.key", 2)
    scalar = block.constant("scalar", np.zeros(0), np.int64)
    one, zero = block.constant("one", 1), block.constant("zero", 0)

    def number(name: str, length: str) -> str:
        return block.add("Reshape", f"/model/{name}/Reshape", length, scalar)

    first, count = number("first", past), number("count", new)
    rows = block.add("Range", "/model/Range", first, block.add("Add", "/model/Add", first, count), one)
    keys = block.add("Range", "/model/Range_1", zero, number("keys", total), one)
    rows = block.add("Unsqueeze", "/model/Unsqueeze", rows, block.constant("axes_1", [1]))
    later = block.add("Greater", "/model/Greater", keys, rows)  # [S, T]
    masked = block.constant("masked", _MASKED, np.float16)
    open_ = block.constant("open", 0.0, np.float16)
    causal = block.add("Where", "/model/Where", later, masked, open_)
    shape = block.add("Concat", "/model/Concat", batch, block.constant("ones_1", [1]), new, total, axis=0)
    causal = block.add("Expand", "/model/Expand", causal, shape)
    padding = block.add("Unsqueeze", "/model/Unsqueeze_1", "attention_mask", block.constant("axes_12", [1, 2]))
    padding = block.add("Equal", "/model/Equal", padding, zero)
    both = block.add("Where", "/model/Where_1", padding, masked, causal)
    ones = block.add(
        "ConstantOfShape", "/model/ConstantOfShape", shape, value=numpy_helper.from_array(np.ones(1, bool))
    )
    places = block.add("Transpose", "/model/Transpose", block.add("NonZero", "/model/NonZero", ones), perm=[1, 0])
    updates = block.add("Reshape", "/model/Reshape", both, block.constant("flat", [-1]))
    return block.add("ScatterND", "/model/ScatterND", causal, places, updates)


def _norm(block: _Block, at: str, value: str, weight: str) -> str:
    """Root mean square, in float32."""
    wide = block.add("Cast", f"{at}/Cast", value, to=TensorProto.FLOAT)
    square = block.add("Pow", f"{at}/Pow", wide, block.constant("two", 2.0, np.float32))
    mean = block.add("ReduceMean", f"{at}/ReduceMean", square, axes=[-1])
    mean = block.add("Add", f"{at}/Add", mean, block.constant("epsilon", block.model.epsilon, np.float32))
    root = block.add("Sqrt", f"{at}/Sqrt", mean)
    factor = block.add("Div", f"{at}/Div", block.constant("one_f32", 1.0, np.float32), root)
    scaled = block.add("Mul", f"{at}/Mul", wide, factor)
    narrow = block.add("Cast", f"{at}/Cast_1", scaled, to=TensorProto.FLOAT16)
    return block.add("Mul", f"{at}/Mul_1", weight, narrow)


def _layer(block: _Block, layer: int, hidden: str, mask: str, cos: str, sin: str) -> str:
    """The residual behind the layer; its presents are made too."""
    at, weights = f"/model/layers.{layer}", f"model.layers.{layer}"
    normed = _norm(block, f"{at}/input_layernorm", hidden, f"{weights}.input_layernorm.weight")
    attended = _attention(block, layer, normed, mask, cos, sin)
    middle = block.add("Add", f"{at}/Add", hidden, attended)
    normed = _norm(block, f"{at}/post_attention_layernorm", middle, f"{weights}.post_attention_layernorm.weight")
    gate, up = _projections(block, normed, f"{weights}.mlp", f"{at}/mlp", ("gate", "up"))
    gate = block.add("Mul", f"{at}/mlp/act_fn/Mul", gate, block.add("Sigmoid", f"{at}/mlp/act_fn/Sigmoid", gate))
    both = block.add("Mul", f"{at}/mlp/Mul", gate, up)
    down = block.add("MatMul", f"{at}/mlp/down_proj/MatMul", both, f"{weights}.mlp.down_proj.weight")
    return block.add("Add", f"{at}/Add_1", middle, down)


def _attention(block: _Block, layer: int, normed: str, mask: str, cos: str, sin: str) -> str:
    model, at = block.model, f"/model/layers.{layer}/self_attn"

    weights = f"model.layers.{layer}.self_attn"
    flat = dict(zip("qkv", _projections(block, normed, weights, at, ("q", "k", "v")), strict=True))

    def projected(part: str, heads: int) -> str:
        value = flat[part]
        if model.qkv_bias:
            value = block.add("Add", f"{at}/{part}_proj/Add", f"{weights}.{part}_proj.bias", value)
        shape = block.constant(f"heads_{heads}", [0, 0, heads, model.head_dim])
        split = block.add("Reshape", f"{at}/{part}/Reshape", value, shape)
        if model.qk_norm and part != "v":
            split = _norm(block, f"{at}/{part}_norm", split, f"{weights}.{part}_norm.weight")
        return block.add("Transpose", f"{at}/{part}/Transpose", split, perm=[0, 2, 1, 3])

    def rotated(part: str, value: str) -> str:
        half, end = block.constant("half", [model.head_dim // 2]), block.constant("end", [2**62])
        axis = block.constant("last", [3])
        low = block.add("Slice", f"{at}/{part}/Slice", value, block.constant("start", [0]), half, axis)
        high = block.add("Slice", f"{at}/{part}/Slice_1", value, half, end, axis)
        turned = block.add("Concat", f"{at}/{part}/Concat", block.add("Neg", f"{at}/{part}/Neg", high), low, axis=-1)
        straight = block.add("Mul", f"{at}/{part}/Mul", value, cos)
        return block.add("Add", f"{at}/{part}/Add", straight, block.add("Mul", f"{at}/{part}/Mul_1", turned, sin))

    def all_heads(half: str, new: str) -> str:
        """Past and new positions, the heads of keys repeated for those of queries."""
        past, present = f"past_key_values.{layer}.{half}", f"present.{layer}.{half}"
        held = block.add("Concat", f"{at}/{half}/Concat", past, new, output=present, axis=2)
        batch, total = (block.length(f"{at}/{half}/{axis}", held, axis) for axis in (0, 2))
        few, each = (
            block.constant("kv_heads", [model.kv_heads]),
            block.constant("each", [model.heads // model.kv_heads]),
        )
        size = block.constant("head_dim", [model.head_dim])
        shape = block.add("Concat", f"{at}/{half}/Concat_1", batch, few, each, total, size, axis=0)
        five = block.add("Unsqueeze", f"{at}/{half}/Unsqueeze", held, block.constant("axes_2", [2]))
        many = block.add("Expand", f"{at}/{half}/Expand", five, shape)
        heads = block.constant("heads", [model.heads])
        shape = block.add("Concat", f"{at}/{half}/Concat_2", batch, heads, total, size, axis=0)
        return block.add("Reshape", f"{at}/{half}/Reshape_1", many, shape)

    queries = rotated("q", projected("q", model.heads))
    keys = all_heads("key", rotated("k", projected("k", model.kv_heads)))
    values = all_heads("value", projected("v", model.kv_heads))
    keys = block.add("Transpose", f"{at}/Transpose_1", keys, perm=[0, 1, 3, 2])
    scores = block.add("MatMul", f"{at}/MatMul", queries, keys)
    scores = block.add("Mul", f"{at}/Mul", scores, block.constant("scale", model.head_dim**-0.5, np.float16))
    scores = block.add("Add", f"{at}/Add", scores, mask)
    scores = block.add("Cast", f"{at}/Cast", scores, to=TensorProto.FLOAT)
    shares = block.add("Cast", f"{at}/Cast_1", block.add("Softmax", f"{at}/Softmax", scores), to=TensorProto.FLOAT16)
    mixed = block.add(
        "Transpose", f"{at}/Transpose_2", block.add("MatMul", f"{at}/MatMul_1", shares, values), perm=[0, 2, 1, 3]
    )
    mixed = block.add("Reshape", f"{at}/Reshape", mixed, block.constant("joined", [0, 0, model.heads * model.head_dim]))
    return block.add("MatMul", f"{at}/o_proj/MatMul", mixed, f"model.layers.{layer}.self_attn.o_proj.weight")


def _projections(block: _Block, value: str, weights: str, at: str, parts: Sequence[str]) -> list[str]:
    """The products of one value with several matrices."""
    names = [f"{weights}.{part}_proj.weight" for part in parts]
    if not block.model.fused:
        return [
            block.add("MatMul", f"{at}/{part}_proj/MatMul", value, name)
            for part, name in zip(parts, names, strict=True)
        ]
    matrices = [numpy_helper.to_array(block.constants.pop(name)) for name in names]
    joined = block.constant(f"{weights}.{''.join(parts)}_proj.weight", np.concatenate(matrices, axis=1), np.float16)
    whole = block.add("MatMul", f"{at}/joined_proj/MatMul", value, joined)
    sizes = block.constant(f"{at}/sizes", [matrix.shape[1] for matrix in matrices])
    outputs = [f"{at}/{part}/Split_output_0" for part in parts]
    block.nodes.append(helper.make_node("Split", [whole, sizes], outputs, name=f"{at}/Split", axis=-1))
    return outputs


#: The reference in the size that people have.
LLAMA_3_1_8B = ReferenceModel(hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocabulary=128256)


def write_reference_blocks(folder: Path, model: ReferenceModel | None = None, *, external: bool = False) -> Path:
    """Write block_1.onnx to block_{layers + 1}.onnx into the folder, which is made. `external`: weights in a file
    beside each."""
    model = model or ReferenceModel()
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(1, model.layers + 2):
        name = f"block_{index}.onnx"
        onnx.save_model(
            reference_block(model, index),
            folder / name,
            save_as_external_data=external,
            location=f"{name}.data",
            size_threshold=1024,
        )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a folder of ONNX blocks with the names of a real export.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=ReferenceModel().layers)
    parser.add_argument("--external", action="store_true", help="weights beside the graphs")
    parser.add_argument("--full-size", action="store_true", help="16 GB with the shapes of Llama-3.1-8B")
    asked = parser.parse_args()
    model = replace(LLAMA_3_1_8B if asked.full_size else ReferenceModel(), layers=asked.layers)
    write_reference_blocks(asked.out, model, external=asked.external)


if __name__ == "__main__":
    main()
