"""Attention of the flavour `paged`: ONNX Runtime's operator `com.microsoft.PagedAttention`.

It writes into the KV pools, rotates queries and keys, and takes a ragged batch as it is:

    inputs    cumulative int32 [B + 1]  tokens in front of each sequence, and of all
              past int32 [B]            tokens of each sequence that are in its pages
              table int32 [B, P]        pages of each sequence from position 0 on, padded with any
              bounds int32 [3]          in the host's memory: the most tokens of a sequence, the longest context, and a
                                        lower bound of that; without them every layer would wait for the device

If all sequences have one token, and the table one width, `bounds` is a constant: the most that they can be.
"""

import numpy as np
from onnx import TensorProto

from blockrelay.block_folder.model import ModelConfig
from blockrelay_worker.execution.onnx.graphs.graph import MICROSOFT, GraphBuilder
from blockrelay_worker.execution.onnx.graphs.pages import replaced
from blockrelay_worker.kernels.specification import PAGE


def describe_batch(graph: GraphBuilder, model: ModelConfig, pages: int | None = None) -> None:
    """Declares the inputs of a batch (see this module's docstring) and the rotary tables `cos` and `sin`.

    The tables are [max_position, head_dim / 2] in the graph's float type. `pages`: the graph is for steps of single
    tokens, in page tables of this width, and `bounds` is a constant; None: for all batches.
    """
    for name, shape in (("cumulative", ["B1"]), ("past", ["B"]), ("table", ["B", "P"])):
        graph.input(name, TensorProto.INT32, shape)
    if pages is None:
        graph.input("bounds", TensorProto.INT32, [3])
    else:
        graph.constant("bounds", np.array([1, pages * PAGE, 1], np.int32))
    for name in ("cos", "sin"):
        graph.input(name, graph.type, [model.max_position, model.head_dim // 2])


def attention(graph: GraphBuilder, model: ModelConfig, place: str, q: str, k: str, v: str) -> str:
    """Adds the attention of one layer and returns the name of its output [R, heads * head_dim].

    `q` [R, heads, head_dim], `k` and `v` [R, kv_heads, head_dim] are names of values, not yet rotated. `place` begins
    the layer's names (`block_3/`). Its pools, `<place>keys` and `<place>values`, become inputs of the graph; keys and
    values are written to their slots there. The graph needs the inputs of `describe_batch` too.
    """
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    q, k, v = (
        graph.reshape(x, [-1, count * dim], f"{x}_flat") for x, count in ((q, heads), (k, kv_heads), (v, kv_heads))
    )
    pools = [f"{place}keys", f"{place}values"]
    outputs = [replaced(graph, model, pool) for pool in pools]
    # Left out: the slots of rows (they follow from the rest), sinks, norms of heads, scales.
    inputs = [q, k, v, *pools, "cumulative", "past", "table", "cos", "sin", *[""] * 6, "bounds"]
    return graph.nodes(
        "PagedAttention",
        inputs,
        [f"{place}attention", *outputs],
        domain=MICROSOFT,
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=dim**-0.5,
        do_rotary=1,
        rotary_interleaved=0,
    )
