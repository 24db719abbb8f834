"""The pools of keys and values, and the graphs that copy KV pages out of them and back.

A layer has two pools, [pages, 16, kv_heads, head_dim]. A session binds the output that replaces a pool to the pool's
own memory, so that it is written in place. Outside a device, pages have the layout that they have on CPUs.
"""

from collections.abc import Sequence

from onnx import TensorProto

from blockrelay.block_folder.model import ModelConfig
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.graphs.graph import GraphBuilder
from blockrelay_worker.kernels.specification import PAGE

#: The axes of a pool (page, slot, head, dimension) in the order of a page on a CPU, and back.
_PAGE_ORDER = {"keys": [0, 2, 3, 1], "values": [0, 2, 1, 3]}
_POOL_ORDER = {"keys": [0, 3, 1, 2], "values": [0, 2, 1, 3]}


def replaced(graph: GraphBuilder, model: ModelConfig, pool: str) -> str:
    """Makes the pool an input, by its name `pool`, such as `block_3/keys`.

    Returns the name of the output that replaces it, `block_3/keys_out`, for which the caller must add a node.
    """
    shape = ["pages of the pool", PAGE, model.kv_heads, model.head_dim]
    graph.input(pool, graph.type, shape)
    graph.output(f"{pool}_out", graph.type, shape)
    return f"{pool}_out"


def written(graph: GraphBuilder, model: ModelConfig, pool: str, places: str, content: str) -> str:
    """Adds the pool with `content` written at `places`, and returns the output's name.

    `places` are int64 [n, 1] of pages, with `content` [n, 16, kv_heads, head_dim]; or [n, 2] of pages and slots, with
    `content` [n, kv_heads, head_dim].
    """
    return graph.node("ScatterND", [pool, places, content], replaced(graph, model, pool))


def export_graph(model: ModelConfig, layers: Sequence[int], dtype: FloatType, *, joined: bool = False) -> bytes:
    """Returns the serialised ONNX model that copies KV pages of `layers` out of their pools.

    Its inputs are `pages`, int64 [p] (page ids), and for each layer N the pools `block_N/keys` and `block_N/values`.
    Its outputs are `block_N/keys_page` [p, kv_heads, head_dim, 16] and `block_N/values_page` [p, kv_heads, 16,
    head_dim]: the layout of a CPU's pages, in `dtype`, the type of the pools (not every device knows both types).

    With `joined` there is one output instead, `contents` [p, n]: for each page, keys and values of each layer, one
    after the other in these layouts.
    """
    graph = GraphBuilder(dtype)
    graph.input("pages", TensorProto.INT64, ["p"])
    parts: list[str] = []
    for block in layers:
        for half, order in _PAGE_ORDER.items():
            pool = f"block_{block}/{half}"
            graph.input(pool, graph.type, ["pages of the pool", PAGE, model.kv_heads, model.head_dim])
            content = graph.node("Gather", [pool, "pages"], f"{pool}_found")
            content = graph.node("Transpose", [content], f"{pool}_turned", perm=order)
            if joined:
                parts.append(graph.reshape(content, [0, -1], f"{pool}_flat"))
            else:
                graph.result(f"{pool}_page", content, ["p", model.kv_heads, "d", "t"], graph.type)
    if joined:
        graph.output(graph.node("Concat", parts, "contents", axis=1), graph.type, ["p", "n"])
    return graph.serialized("export")


def import_graph(model: ModelConfig, layers: Sequence[int], dtype: FloatType) -> bytes:
    """Returns the serialised ONNX model that writes KV pages of `layers` into their pools.

    Its inputs are `pages`, int64 [p, 1] (page ids), the pools, and for each layer N `block_N/keys_page` and
    `block_N/values_page`, as the model of `export_graph` without `joined` gives them. Its outputs are the pools with
    these pages, `block_N/keys_out` and `block_N/values_out`.
    """
    graph = GraphBuilder(dtype)
    graph.input("pages", TensorProto.INT64, ["p", 1])
    for block in layers:
        for half, order in _POOL_ORDER.items():
            pool = f"block_{block}/{half}"
            graph.input(f"{pool}_page", graph.type, ["p", model.kv_heads, "d", "t"])
            content = graph.node("Transpose", [f"{pool}_page"], f"{pool}_turned", perm=order)
            written(graph, model, pool, "pages", content)
    return graph.serialized("import")
