"""A whole decoder as onnxruntime-genai's builder writes it: attention, norms that add the residual, and 4-bit products
are single operators of ONNX Runtime. What one layer hands to the next is two tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from tests.support.models.reference_blocks import ReferenceModel
from tests.support.models.whole_decoders import SMALL

_MICROSOFT = "com.microsoft"
_B, _S, _P, _T = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"


@dataclass(frozen=True, slots=True)
class Packing:
    """How MatMulNBits has its weights."""

    bits: int = 4
    group: int = 32
    zero_points: bool = False


@dataclass(slots=True)
class _Writer:
    model: ReferenceModel
    packing: "Packing | None"
    dtype: Any
    random: np.random.Generator
    nodes: list[NodeProto] = field(default_factory=list[NodeProto])
    constants: list[TensorProto] = field(default_factory=list[TensorProto])
    rows: list[str] = field(default_factory=list[str])
    """What is [batch, positions, hidden]: the builder writes down the shapes that no operator's own rule tells."""

    def add(self, kind: str, at: str, inputs: Sequence[str], outputs: Sequence[str] = (), **attributes: Any) -> str:
        """A node; its outputs are called `AT/output_0` where nothing else is said. The first one's name."""
        outputs = outputs or [f"{at}/output_0"]
        domain = _MICROSOFT if kind.startswith(("Skip", "Group", "MatMulN")) else ""
        self.nodes.append(helper.make_node(kind, list(inputs), list(outputs), name=at, domain=domain, **attributes))
        return outputs[0]

    def constant(self, name: str, value: NDArray[Any]) -> str:
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def product(self, at: str, value: str, rows: int, columns: int, output: str | None = None) -> str:
        """With weights of its own, [rows, columns]."""
        outputs = [output] if output else []
        weight = f"{at.strip('/').replace('/', '.')}.weight"
        how = self.packing
        if how is None:
            matrix = (self.random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(self.dtype)
            return self.add("MatMul", at, [value, self.constant(weight, matrix)], outputs)
        groups = rows // how.group
        packed = self.random.integers(0, 256, (columns, groups, how.group * how.bits // 8), np.uint8)
        scales = self.random.uniform(0.5, 1.5, columns * groups).astype(np.float32) / np.float32(4 * np.sqrt(rows))
        scales = (scales * np.float32(16 / 2**how.bits)).astype(self.dtype)
        inputs = [value, self.constant(f"{weight}_q4", packed), self.constant(f"{weight}_scales", scales)]
        if how.zero_points:
            count = columns * -(-groups * how.bits // 8)
            inputs.append(self.constant(f"{weight}_zp", self.random.integers(0, 256, count, np.uint8)))
        return self.add("MatMulNBits", at, inputs, outputs, K=rows, N=columns, bits=how.bits, block_size=how.group)

    def norm(self, name: str, size: int = 0) -> str:
        return self.constant(name, self.random.uniform(0.5, 1.5, size or self.model.hidden).astype(self.dtype))


def genai_decoder(
    model: ReferenceModel = SMALL, *, int4: bool = False, packing: Packing | None = None, float16: bool = False
) -> ModelProto:
    """In float32, or float16; with `int4` or a `packing` its products are packed, and queries, keys and values in one.

    All keys are listed before all values, and how long their vectors are has a name alone.
    """
    write = _Writer(
        model,
        Packing() if int4 else packing,
        np.float16 if float16 else np.float32,
        np.random.default_rng(model.seed),
    )
    table = write.random.standard_normal((model.vocabulary, model.hidden)).astype(write.dtype)
    embedding = write.constant("model.embed_tokens.weight", table)
    hidden = write.add("Gather", "/model/embed_tokens/Gather", [embedding, "input_ids"])
    lengths = _lengths(write)
    angles = np.arange(1024)[:, None] * model.frequencies()[None, :]
    cos = write.constant("cos_cache", np.cos(angles).astype(write.dtype))
    sin = write.constant("sin_cache", np.sin(angles).astype(write.dtype))
    normed = write.add(
        "SimplifiedLayerNormalization",
        "/model/layers.0/input_layernorm",
        [hidden, write.norm("model.layers.0.input_layernorm.weight")],
        axis=-1,
        epsilon=model.epsilon,
    )
    for layer in range(model.layers):
        attended = _attention(write, layer, normed, [*lengths, cos, sin])
        normed, hidden = _norm_that_adds(write, f"/model/layers.{layer}/post_attention_layernorm", hidden, attended)
        down = _mlp(write, f"/model/layers.{layer}/mlp", normed)
        last = layer + 1 == model.layers
        at = f"/model/layers.{layer + 1}/final_norm_layernorm" if last else f"/model/layers.{layer + 1}/input_layernorm"
        normed, hidden = _norm_that_adds(write, at, hidden, down)
    write.product("/lm_head", normed, model.hidden, model.vocabulary, "logits")
    kind = TensorProto.FLOAT16 if float16 else TensorProto.FLOAT
    shapes = [helper.make_tensor_value_info(name, kind, [_B, _S, model.hidden]) for name in write.rows]
    declared = _declared(model, float16=float16)
    graph = helper.make_graph(write.nodes, "main_graph", *declared, write.constants, value_info=shapes)
    sets = [helper.make_opsetid("", 21), helper.make_opsetid(_MICROSOFT, 1)]
    return helper.make_model(graph, producer_name="onnxruntime-genai", ir_version=10, opset_imports=sets)


def _lengths(write: _Writer) -> list[str]:
    """Of the mask: how many positions each row has, less one, and the longest."""
    at = "/model/attn_mask_reformat"
    axis = write.constant("axis_1", np.array([1], np.int64))
    one = write.constant("one", np.array([1], np.int64))
    number = write.constant("number_1", np.array(1, np.int64))
    total = write.add("ReduceSum", f"{at}/ReduceSum", ["attention_mask", axis], keepdims=0)
    total = write.add("Sub", f"{at}/Sub", [total, one])
    rows = write.add("Cast", f"{at}/attn_mask_subgraph/Sub/Cast", [total], to=TensorProto.INT32)
    shape = write.add("Shape", f"{at}/Shape", ["attention_mask"])
    longest = write.add("Gather", f"{at}/Gather", [shape, number], axis=0)
    return [rows, write.add("Cast", f"{at}/attn_mask_subgraph/Gather/Cast", [longest], to=TensorProto.INT32)]


def _attention(write: _Writer, layer: int, normed: str, rest: Sequence[str]) -> str:
    model, at = write.model, f"/model/layers.{layer}/attn"
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if write.packing is not None:
        parts = [write.product(f"{at}/qkv_proj/MatMul", normed, model.hidden, wide + 2 * narrow), "", ""]
    else:
        parts = [
            write.product(f"{at}/{part}_proj/MatMul", normed, model.hidden, columns)
            for part, columns in (("q", wide), ("k", narrow), ("v", narrow))
        ]
        parts = [_of_heads(write, f"{at}/{part}", name) for part, name in zip("qkv", parts, strict=True)]
    pasts = [f"past_key_values.{layer}.{half}" for half in ("key", "value")]
    presents = [f"present.{layer}.{half}" for half in ("key", "value")]
    mixed = write.add(
        "GroupQueryAttention",
        f"{at}/GroupQueryAttention",
        [*parts, *pasts, *rest],
        [f"{at}/GroupQueryAttention/output_0", *presents],
        num_heads=model.heads,
        kv_num_heads=model.kv_heads,
        scale=model.head_dim**-0.5,
        do_rotary=1,
        rotary_interleaved=0,
    )
    return write.product(f"{at}/o_proj/MatMul", mixed, wide, model.hidden)


def _of_heads(write: _Writer, at: str, value: str) -> str:
    """Queries, keys or values with their bias, and the norm of each head."""
    model, part = write.model, at[-1]
    heads = model.heads if part == "q" else model.kv_heads
    if model.qkv_bias:
        bias = write.random.standard_normal(heads * model.head_dim).astype(write.dtype)
        value = write.add("Add", f"{at}_proj/Add", [value, write.constant(f"{at}_proj.bias", bias)])
    if model.qk_norm and part != "v":
        apart = write.constant(f"{at}_norm/apart", np.array([0, -1, model.head_dim], np.int64))
        shape = write.constant(f"{at}_norm/together", np.array([0, -1, heads * model.head_dim], np.int64))
        split = write.add("Reshape", f"{at}_norm/Reshape_1", [value, apart])
        inputs = [split, write.norm(f"{at}_norm.weight", model.head_dim)]
        normed = write.add("SimplifiedLayerNormalization", f"{at}_norm", inputs, axis=-1, epsilon=model.epsilon)
        value = write.add("Reshape", f"{at}_norm/Reshape_2", [normed, shape])
    return value


def _mlp(write: _Writer, at: str, normed: str) -> str:
    model = write.model
    gate = write.product(f"{at}/gate_proj/MatMul", normed, model.hidden, model.mlp)
    up = write.product(f"{at}/up_proj/MatMul", normed, model.hidden, model.mlp)
    gate = write.add("Mul", f"{at}/act_fn/Mul", [gate, write.add("Sigmoid", f"{at}/act_fn/Sigmoid", [gate])])
    both = write.add("Mul", f"{at}/Mul", [gate, up])
    write.rows.append(write.product(f"{at}/down_proj/MatMul", both, model.mlp, model.hidden))
    return write.rows[-1]


def _norm_that_adds(write: _Writer, at: str, hidden: str, value: str) -> tuple[str, str]:
    """The normed sum, and the sum, which the last layer has no use for."""
    weight = write.norm(f"{at.strip('/').replace('/', '.')}.weight")
    last = at.endswith("final_norm_layernorm")
    outputs = [f"{at}/output_0"] if last else [f"{at}/output_0", "", "", f"{at}/output_3"]
    write.add("SkipSimplifiedLayerNormalization", at, [hidden, value, weight], outputs, epsilon=write.model.epsilon)
    write.rows += [name for name in outputs if name]
    return f"{at}/output_0", f"{at}/output_3"


def _declared(model: ReferenceModel, *, float16: bool) -> tuple[list[ValueInfoProto], list[ValueInfoProto]]:
    caches = [(layer, half) for half in ("key", "value") for layer in range(model.layers)]

    kind = TensorProto.FLOAT16 if float16 else TensorProto.FLOAT

    def cache(name: str, positions: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, [_B, model.kv_heads, positions, "kv_cache_dim"])

    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, [_B, _S]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, [_B, _T]),
        *(cache(f"past_key_values.{layer}.{half}", _P) for layer, half in caches),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", kind, [_B, _S, model.vocabulary]),
        *(cache(f"present.{layer}.{half}", _T) for layer, half in caches),
    ]
    return inputs, outputs
