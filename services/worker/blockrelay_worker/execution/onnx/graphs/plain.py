"""Attention of the flavour `plain`: standard operators, on KV pages in place.

ScatterND writes into the pools. Rows come ragged, as in `Batch`; attention pads them to sequences.

    inputs    positions int64 [R]    of each row
              slots int64 [R, 2]     page and slot of its keys and values
              rows int64 [B, S]      row of each sequence at each step, padded with any
              back int64 [R]         where each row is in [B * S]
              reach float [B, S]     position of each of `rows`, padded with 0: it attends to this and earlier ones
              table int64 [B, P]     pages of each sequence from position 0 on, padded with any
              seen float [P * 16]    0, 1, 2, ...: the positions in `table`

Slots of `table` after a sequence's last row belong to other sequences, and may hold NaN: they are read as zeros.
"""

from onnx import TensorProto

from blockrelay.block_folder.model import ModelConfig
from blockrelay_worker.execution.onnx.graphs.graph import GraphBuilder
from blockrelay_worker.execution.onnx.graphs.pages import written

#: Added to the score of a masked key: far below every score, but finite.
_UNSEEN = -1e9


def describe_batch(graph: GraphBuilder, model: ModelConfig, pages: int | None = None) -> None:
    """Declares the inputs of a batch (see this module's docstring) and the rotary tables `cos` and `sin`.

    The tables are [max_position, head_dim / 2] in the graph's float type. Adds the masks that all layers share. `pages`
    is ignored: the graph is for page tables of all widths.
    """
    for name, shape in (
        ("positions", ["R"]),
        ("slots", ["R", 2]),
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
    graph.node("Where", [visible, graph.number(0.0), graph.number(_UNSEEN)], "mask")
    last = graph.node("ReduceMax", ["reach", graph.integers(1)], "last", keepdims=1)
    within = graph.node("LessOrEqual", ["seen", last], "within")
    graph.node("Unsqueeze", [within, graph.integers(2, 3)], "own")


def attention(graph: GraphBuilder, model: ModelConfig, place: str, q: str, k: str, v: str) -> str:
    """Adds the attention of one layer and returns the name of its output [R, heads * head_dim].

    `q` [R, heads, head_dim], `k` and `v` [R, kv_heads, head_dim] are names of values, not yet rotated. `place` begins
    the layer's names (`block_3/`). Its pools, `<place>keys` and `<place>values`, become inputs of the graph; keys and
    values are written to their slots there. Call `describe_batch` on the graph before: its nodes must come first.
    """
    heads, dim = model.heads, model.head_dim
    q, k = _rotated(graph, q, dim), _rotated(graph, k, dim)
    keys, values = (
        _of_sequences(graph, model, written(graph, model, f"{place}{name}", "slots", rows))
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
    mixed = graph.reshape(mixed, [-1, heads * dim], f"{place}padded_rows", known=["B*S", heads * dim])
    return graph.node("Gather", [mixed, "back"], f"{place}attention")


def _rotated(graph: GraphBuilder, x: str, dim: int) -> str:
    """Rotates x [R, heads, dim] by the rows of the rotary tables: the first half of each head with the second."""
    first, second = graph.split(x, [dim // 2] * 2, [f"{x}_first", f"{x}_second"])
    cos, sin = "cos_of_heads", "sin_of_heads"
    fc, ss, sc, fs = (
        graph.node("Mul", [part, table], f"{x}_{name}")
        for name, part, table in (("fc", first, cos), ("ss", second, sin), ("sc", second, cos), ("fs", first, sin))
    )
    left, right = graph.node("Sub", [fc, ss], f"{x}_left"), graph.node("Add", [sc, fs], f"{x}_right")
    return graph.node("Concat", [left, right], f"{x}_rotated", axis=-1)


def _of_sequences(graph: GraphBuilder, model: ModelConfig, pool: str) -> str:
    """Gathers a pool's content for each sequence and query head: [B, heads, P * 16, head_dim], zeros after the last
    row.

    0 x NaN is NaN, so padding must be zero.
    """
    kv_heads, dim, group = model.kv_heads, model.head_dim, model.heads // model.kv_heads
    content = graph.node("Gather", [pool, "table"], f"{pool}_found")
    known = ["B", "L", kv_heads, dim]
    content = graph.reshape(content, [0, -1, kv_heads, dim], f"{pool}_sequences", known=known)  # the first axis is kept
    content = graph.node("Where", ["own", content, graph.number(0.0)], f"{pool}_own")
    if group > 1:
        content = graph.node("Unsqueeze", [content, graph.integers(3)], f"{pool}_alone")
        content = graph.node("Tile", [content, graph.integers(1, 1, 1, group, 1)], f"{pool}_repeated")
        graph.knows(content, ["B", "L", kv_heads, group, dim])
        content = graph.reshape(
            content, [0, -1, model.heads, dim], f"{pool}_of_heads", known=["B", "L", model.heads, dim]
        )
    return graph.node("Transpose", [content], f"{pool}_by_head", perm=[0, 2, 1, 3])
