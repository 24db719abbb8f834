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
_BLOCK = 32
_B, _S, _P, _T = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"


@dataclass(slots=True)
class _Writer:
    model: ReferenceModel
    int4: bool
    random: np.random.Generator
    nodes: list[NodeProto] = field(default_factory=list[NodeProto])
    constants: list[TensorProto] = field(default_factory=list[TensorProto])

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
        if not self.int4:
            matrix = (self.random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
            return self.add("MatMul", at, [value, self.constant(weight, matrix)], outputs)
        groups = rows // _BLOCK
        packed = self.random.integers(0, 256, (columns, groups, _BLOCK // 2), np.uint8)
        scales = self.random.uniform(0.5, 1.5, columns * groups).astype(np.float32) / np.float32(4 * np.sqrt(rows))
        inputs = [value, self.constant(f"{weight}_q4", packed), self.constant(f"{weight}_scales", scales)]
        return self.add("MatMulNBits", at, inputs, outputs, K=rows, N=columns, bits=4, block_size=_BLOCK)

    def norm(self, name: str) -> str:
        return self.constant(name, self.random.uniform(0.5, 1.5, self.model.hidden).astype(np.float32))


def genai_decoder(model: ReferenceModel = SMALL, *, int4: bool = False) -> ModelProto:
    """In float32; with `int4` its products in 4 bits, and queries, keys and values in one of them.

    All keys are listed before all values, and how long their vectors are has a name alone.
    """
    write = _Writer(model, int4, np.random.default_rng(model.seed))
    table = write.random.standard_normal((model.vocabulary, model.hidden)).astype(np.float32)
    embedding = write.constant("model.embed_tokens.weight", table)
    hidden = write.add("Gather", "/model/embed_tokens/Gather", [embedding, "input_ids"])
    lengths = _lengths(write)
    angles = np.arange(1024)[:, None] * model.frequencies()[None, :]
    cos = write.constant("cos_cache", np.cos(angles).astype(np.float32))
    sin = write.constant("sin_cache", np.sin(angles).astype(np.float32))
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
    graph = helper.make_graph(write.nodes, "main_graph", *_declared(model), write.constants)
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
    if write.int4:
        parts = [write.product(f"{at}/qkv_proj/MatMul", normed, model.hidden, wide + 2 * narrow), "", ""]
    else:
        parts = [
            write.product(f"{at}/{part}_proj/MatMul", normed, model.hidden, columns)
            for part, columns in (("q", wide), ("k", narrow), ("v", narrow))
        ]
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


def _mlp(write: _Writer, at: str, normed: str) -> str:
    model = write.model
    gate = write.product(f"{at}/gate_proj/MatMul", normed, model.hidden, model.mlp)
    up = write.product(f"{at}/up_proj/MatMul", normed, model.hidden, model.mlp)
    gate = write.add("Mul", f"{at}/act_fn/Mul", [gate, write.add("Sigmoid", f"{at}/act_fn/Sigmoid", [gate])])
    both = write.add("Mul", f"{at}/Mul", [gate, up])
    return write.product(f"{at}/down_proj/MatMul", both, model.mlp, model.hidden)


def _norm_that_adds(write: _Writer, at: str, hidden: str, value: str) -> tuple[str, str]:
    """The normed sum, and the sum, which the last layer has no use for."""
    weight = write.norm(f"{at.strip('/').replace('/', '.')}.weight")
    last = at.endswith("final_norm_layernorm")
    outputs = [f"{at}/output_0"] if last else [f"{at}/output_0", "", "", f"{at}/output_3"]
    write.add("SkipSimplifiedLayerNormalization", at, [hidden, value, weight], outputs, epsilon=write.model.epsilon)
    return f"{at}/output_0", f"{at}/output_3"


def _declared(model: ReferenceModel) -> tuple[list[ValueInfoProto], list[ValueInfoProto]]:
    caches = [(layer, half) for half in ("key", "value") for layer in range(model.layers)]

    def cache(name: str, positions: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [_B, model.kv_heads, positions, "kv_cache_dim"])

    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, [_B, _S]),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, [_B, _T]),
        *(cache(f"past_key_values.{layer}.{half}", _P) for layer, half in caches),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, [_B, _S, model.vocabulary]),
        *(cache(f"present.{layer}.{half}", _T) for layer, half in caches),
    ]
    return inputs, outputs
