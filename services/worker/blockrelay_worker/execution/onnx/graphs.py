"""The graph of a stage: consecutive blocks as one ONNX model, in the flavour `plain` (standard operators).

Weights are inputs, so that sessions share one copy on the device. Keys and values are pools with a slot for each
position, [slots, kv_heads, head_dim]; a session binds the outputs `.../keys_out` to the memory of the inputs
`.../keys`, so that ScatterND writes in place. Rows come ragged, as in `Batch`; attention pads them to sequences.

    inputs    tokens int32 [R] (a stage with block 1) or hidden float32 [R, H]
              positions int64 [R]    of each row
              slots int64 [R, 1]     where its keys and values go
              rows int64 [B, S]      row of each sequence at each step, padded with any
              back int64 [R]         where each row is in [B * S]
              reach float [B, S]     the position of each of `rows`: it sees that and what is before it
              table int64 [B, P]     pages of each sequence from position 0 on, padded with any
              seen float [P * 16]    0, 1, 2, ...: the positions in `table`
              take int64 [n]         rows whose logits are wanted (a stage with the last block)
              cos, sin               [max_position, head_dim / 2], and the weights by block (`weight_shapes`)
    outputs   hidden float32 [R, H], or logits float32 [n, vocab] and sums float32 [R]: of each row in front of the
              head, for whoever asks whether all are finite; the pools

What lies in `table` behind a sequence's last row is somebody else's, and perhaps not finite: it is read as zeros.

Nodes are called after their block (`block_3/o`), so that an error of ONNX Runtime names it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from blockrelay.block_folder.model import ModelConfig
from blockrelay_worker.kernels.specification import PAGE

#: Changes with anything in the graphs that can change a bit.
GRAPHS_VERSION = "plain 1"
#: What DirectML's newest package still reads.
OPSET, MICROSOFT_OPSET, IR_VERSION = 21, 1, 10
MICROSOFT = "com.microsoft"

FloatType = Literal["float32", "float16"]
_TYPES: Mapping[FloatType, int] = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
#: Added to the score of a key that a row does not see: far below every score, and no infinity.
_UNSEEN: Mapping[FloatType, float] = {"float32": -1e9, "float16": -6e4}


def weight_shapes(model: ModelConfig, block: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a block multiplies with and adds, in the order of the graph's inputs."""
    if block == model.blocks:
        return {"norm_final": (model.hidden_size,), "head": model.linear_shape("head")}
    found: dict[str, tuple[int, ...]] = {}
    if block == 1:
        found["embedding"] = (model.vocab_size, model.hidden_size)
    found["norm_attention"] = (model.hidden_size,)
    found["qkv"] = model.linear_shape("qkv")
    if model.qkv_bias:
        found["qkv.bias"] = (model.qkv_columns,)
    if model.qk_norm:
        found["norm_q"] = found["norm_k"] = (model.head_dim,)
    found["o"] = model.linear_shape("o")
    found["norm_mlp"] = (model.hidden_size,)
    found["gate_up"] = model.linear_shape("gate_up")
    found["down"] = model.linear_shape("down")
    return found


def stage_graph(model: ModelConfig, first_block: int, last_block: int, *, dtype: FloatType) -> bytes:
    """The ONNX model of blocks `first_block..last_block`. Its bytes depend on the arguments alone."""
    graph = _Graph(dtype)
    layers = range(first_block, min(last_block, model.layers) + 1)
    if layers:
        _describe_batch(graph, model)
    if first_block == 1:
        graph.input("tokens", TensorProto.INT32, ["R"])
    else:
        graph.input("hidden", TensorProto.FLOAT, ["R", model.hidden_size])
    for block in range(first_block, last_block + 1):
        for name, shape in weight_shapes(model, block).items():
            graph.input(f"block_{block}/{name}", graph.type, shape)
    if first_block == 1:
        x = graph.node("Gather", ["block_1/embedding", "tokens"], "block_1/x")
    else:
        x = graph.cast("hidden", graph.type, f"block_{first_block}/x")
    for block in layers:
        x = _layer(graph, model, block, x)
    if last_block == model.blocks:
        graph.input("take", TensorProto.INT64, ["n"])
        place = f"block_{last_block}/"
        graph.result("sums", graph.node("ReduceSum", [x, graph.integers(-1)], f"{place}sums", keepdims=0), ["R"])
        x = _norm(graph, model, graph.node("Gather", [x, "take"], f"{place}taken"), f"{place}norm_final")
        x = graph.node("MatMul", [x, f"{place}head"], f"{place}product")
        graph.result("logits", x, ["n", model.vocab_size])
    else:
        graph.result("hidden_out", x, ["R", model.hidden_size])
    return graph.serialized(f"block_{first_block} to block_{last_block}")


#: The axes of a pool by page (page, slot, head, number) in the order that a page on a CPU has them, and back.
_PAGE_ORDER = {"keys": [0, 2, 3, 1], "values": [0, 2, 1, 3]}
_POOL_ORDER = {"keys": [0, 3, 1, 2], "values": [0, 2, 1, 3]}


def export_graph(model: ModelConfig, layers: Sequence[int], *, dtype: FloatType) -> bytes:
    """Pools and `pages` int64 [p] -> `.../keys_page` [p, kv_heads, head_dim, 16] and `.../values_page` [p, kv_heads,
    16, head_dim]: what a CPU has of the same pages, in the pools' type (not every device knows both)."""
    graph = _Graph(dtype)
    graph.input("pages", TensorProto.INT64, ["p"])
    by_page = graph.integers(-1, PAGE, model.kv_heads, model.head_dim)
    for block in layers:
        for half, order in _PAGE_ORDER.items():
            pool = f"block_{block}/{half}"
            graph.input(pool, graph.type, ["slots of the pool", model.kv_heads, model.head_dim])
            found = graph.node(
                "Gather", [graph.node("Reshape", [pool, by_page], f"{pool}_by_page"), "pages"], f"{pool}_found"
            )
            found = graph.node("Transpose", [found], f"{pool}_turned", perm=order)
            graph.result(f"{pool}_page", found, ["p", model.kv_heads, "d", "t"], graph.type)
    return graph.serialized("export")


def import_graph(model: ModelConfig, layers: Sequence[int], *, dtype: FloatType) -> bytes:
    """The way back: pools, `slots` int64 [p * 16, 1] and what an export gave -> the pools."""
    graph = _Graph(dtype)
    graph.input("slots", TensorProto.INT64, ["p16", 1])
    for block in layers:
        for half, order in _POOL_ORDER.items():
            pool = f"block_{block}/{half}"
            graph.input(f"{pool}_page", graph.type, ["p", model.kv_heads, "d", "t"])
            rows = graph.node("Transpose", [f"{pool}_page"], f"{pool}_turned", perm=order)
            rows = graph.node("Reshape", [rows, graph.integers(-1, model.kv_heads, model.head_dim)], f"{pool}_rows")
            graph.stored(pool, [model.kv_heads, model.head_dim], rows)
    return graph.serialized("import")


def sum_graph(dtype: FloatType) -> bytes:
    """`a` [n] and `b` [n] -> `c`, what they add up to: the least that a device can be asked."""
    graph = _Graph(dtype)
    for name in ("a", "b"):
        graph.input(name, graph.type, ["n"])
    graph.result("c", graph.node("Add", ["a", "b"], "sum"), ["n"], graph.type)
    return graph.serialized("sum")


def _describe_batch(graph: "_Graph", model: ModelConfig) -> None:
    """The inputs that say where rows are, and what all layers make of them."""
    for name, shape in (
        ("positions", ["R"]),
        ("slots", ["R", 1]),
        ("rows", ["B", "S"]),
        ("back", ["R"]),
        ("table", ["B", "P"]),
    ):
        graph.input(name, TensorProto.INT64, shape)
    graph.input("reach", TensorProto.FLOAT, ["B", "S"])
    graph.input("seen", TensorProto.FLOAT, ["L"])
    for name in ("cos", "sin"):
        graph.input(name, graph.type, [model.max_position, model.head_dim // 2])
        at = graph.node("Gather", [name, "positions"], f"{name}_rows")
        graph.node("Unsqueeze", [at, graph.integers(1)], f"{name}_of_heads")
    reach = graph.node("Unsqueeze", ["reach", graph.integers(1, 3)], "reach_of_keys")
    visible = graph.node("LessOrEqual", ["seen", reach], "visible")
    bias = [graph.number(0.0), graph.number(_UNSEEN[graph.dtype])]
    graph.node("Where", [visible, *bias], "mask")
    last = graph.node("ReduceMax", ["reach", graph.integers(1)], "last", keepdims=1)
    within = graph.node("LessOrEqual", ["seen", last], "within")
    graph.node("Unsqueeze", [within, graph.integers(2, 3)], "own")


def _layer(graph: "_Graph", model: ModelConfig, block: int, x: str) -> str:
    """Attention and MLP: x [R, H] -> [R, H]."""
    place = f"block_{block}/"
    attended = _attention(graph, model, place, _norm(graph, model, x, f"{place}norm_attention"))
    x = graph.node("Add", [x, graph.node("MatMul", [attended, f"{place}o"], f"{place}o_product")], f"{place}attended")
    y = _norm(graph, model, x, f"{place}norm_mlp")
    y = graph.node("MatMul", [y, f"{place}gate_up"], f"{place}gate_up_product")
    gate, up = graph.split(y, [model.intermediate_size] * 2, [f"{place}gate", f"{place}up"])
    gate = graph.node("Mul", [gate, graph.node("Sigmoid", [gate], f"{place}sigmoid")], f"{place}silu")
    y = graph.node("Mul", [gate, up], f"{place}activated")
    return graph.node("Add", [x, graph.node("MatMul", [y, f"{place}down"], f"{place}down_product")], f"{place}out")


def _norm(graph: "_Graph", model: ModelConfig, x: str, weight: str) -> str:
    return graph.node(
        "SimplifiedLayerNormalization", [x, weight], f"{weight}_out", axis=-1, epsilon=model.rms_norm_eps, stash_type=1
    )


def _attention(graph: "_Graph", model: ModelConfig, place: str, x: str) -> str:
    """[R, H] -> [R, heads * head_dim]; the rows' keys and values go to their slots."""
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    qkv = graph.node("MatMul", [x, f"{place}qkv"], f"{place}qkv_product")
    if model.qkv_bias:
        qkv = graph.node("Add", [qkv, f"{place}qkv.bias"], f"{place}qkv_biased")
    parts = graph.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], [f"{place}{n}" for n in ("q", "k", "v")])
    q, k, v = (
        graph.node("Reshape", [part, graph.integers(-1, count, dim)], f"{part}_heads")
        for part, count in zip(parts, (heads, kv_heads, kv_heads), strict=True)
    )
    if model.qk_norm:
        q, k = _norm(graph, model, q, f"{place}norm_q"), _norm(graph, model, k, f"{place}norm_k")
    q, k = _rotated(graph, q, dim), _rotated(graph, k, dim)
    keys, values = (
        _of_sequences(graph, model, graph.stored(f"{place}{name}", [kv_heads, dim], rows))
        for name, rows in (("keys", k), ("values", v))
    )
    q = graph.node(
        "Transpose", [graph.node("Gather", [q, "rows"], f"{place}q_padded")], f"{place}queries", perm=[0, 2, 1, 3]
    )
    keys = graph.node("Transpose", [keys], f"{place}keys_across", perm=[0, 1, 3, 2])
    scores = graph.node("MatMul", [q, keys], f"{place}scores")
    scores = graph.node("Mul", [scores, graph.number(dim**-0.5)], f"{place}scaled")
    scores = graph.node("Add", [scores, "mask"], f"{place}masked")
    mixed = graph.node("MatMul", [graph.node("Softmax", [scores], f"{place}shares", axis=-1), values], f"{place}mixed")
    mixed = graph.node("Transpose", [mixed], f"{place}mixed_rows", perm=[0, 2, 1, 3])
    mixed = graph.node("Reshape", [mixed, graph.integers(-1, heads * dim)], f"{place}padded_rows")
    return graph.node("Gather", [mixed, "back"], f"{place}attention")


def _rotated(graph: "_Graph", x: str, dim: int) -> str:
    """x [R, heads, dim], by the tables' rows: the first half of a head with the second."""
    first, second = graph.split(x, [dim // 2] * 2, [f"{x}_first", f"{x}_second"])
    cos, sin = "cos_of_heads", "sin_of_heads"
    products = {
        name: graph.node("Mul", [part, table], f"{x}_{name}")
        for name, part, table in (("fc", first, cos), ("ss", second, sin), ("sc", second, cos), ("fs", first, sin))
    }
    return graph.node(
        "Concat",
        [
            graph.node("Sub", [products["fc"], products["ss"]], f"{x}_left"),
            graph.node("Add", [products["sc"], products["fs"]], f"{x}_right"),
        ],
        f"{x}_rotated",
        axis=-1,
    )


def _of_sequences(graph: "_Graph", model: ModelConfig, pool: str) -> str:
    """What a pool holds of the sequences, for each query head: [B, heads, P * 16, head_dim], zeros behind the last row.

    Zeros, because a share of 0 times what is not finite is no 0.
    """
    kv_heads, dim, group = model.kv_heads, model.head_dim, model.heads // model.kv_heads
    pages = graph.node("Reshape", [pool, graph.integers(-1, PAGE, kv_heads, dim)], f"{pool}_pages")
    found = graph.node("Gather", [pages, "table"], f"{pool}_found")
    found = graph.node("Reshape", [found, graph.shape_of_sequences(kv_heads, dim)], f"{pool}_sequences")
    found = graph.node("Where", ["own", found, graph.number(0.0)], f"{pool}_own")
    if group > 1:
        found = graph.node("Unsqueeze", [found, graph.integers(3)], f"{pool}_alone")
        found = graph.node("Tile", [found, graph.integers(1, 1, 1, group, 1)], f"{pool}_repeated")
        found = graph.node("Reshape", [found, graph.shape_of_sequences(model.heads, dim)], f"{pool}_of_heads")
    return graph.node("Transpose", [found], f"{pool}_by_head", perm=[0, 2, 1, 3])


class _Graph:
    """A graph that grows. Nodes are called after their first output."""

    def __init__(self, dtype: FloatType) -> None:
        self.dtype: FloatType = dtype
        self.type = _TYPES[dtype]
        self._nodes: list[NodeProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._constants: dict[str, TensorProto] = {}

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self._inputs.append(helper.make_tensor_value_info(name, kind, list(shape)))

    def result(self, name: str, value: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> None:
        """An output of the type `kind`."""
        self.cast(value, kind, name)
        self._outputs.append(helper.make_tensor_value_info(name, kind, list(shape)))

    def stored(self, pool: str, heads: Sequence[int], rows: str) -> str:
        """A pool with the rows at their slots: an output that takes the place of the input."""
        shape = ["slots of the pool", *heads]
        self.input(pool, self.type, shape)
        self._outputs.append(helper.make_tensor_value_info(f"{pool}_out", self.type, shape))
        return self.node("ScatterND", [pool, "slots", rows], f"{pool}_out")

    def node(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

    def split(self, value: str, sizes: Sequence[int], outputs: Sequence[str]) -> list[str]:
        """Along the last axis."""
        inputs = [value, self.integers(*sizes)]
        self._nodes.append(helper.make_node("Split", inputs, list(outputs), name=outputs[0], axis=-1))
        return list(outputs)

    def cast(self, value: str, kind: int, output: str) -> str:
        return self.node("Cast", [value], output, to=kind)

    def integers(self, *values: int) -> str:
        """A constant, int64 [len(values)]."""
        return self._constant(f"integers {' '.join(map(str, values))}", np.array(values, np.int64))

    def number(self, value: float) -> str:
        """A constant of the graph's type."""
        return self._constant(f"number {value!r}", np.array(value, np.dtype(self.dtype)))

    def shape_of_sequences(self, heads: int, dim: int) -> str:
        """[B, P * 16, heads, dim] as a shape: the first axis is kept, the second follows."""
        return self.integers(0, -1, heads, dim)

    def _constant(self, name: str, value: "np.ndarray[Any, Any]") -> str:
        self._constants.setdefault(name, numpy_helper.from_array(value, name))
        return name

    def serialized(self, name: str) -> bytes:
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, list(self._constants.values()))
        made = helper.make_model(
            graph,
            producer_name="blockrelay",
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, MICROSOFT_OPSET)],
        )
        return made.SerializeToString(deterministic=True)
