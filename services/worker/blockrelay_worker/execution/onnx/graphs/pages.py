"""The pools of keys and values, and the graphs that move pages out of them and back.

A layer has two, [pages, 16, kv_heads, head_dim]. A session binds the output that takes a pool's place to the memory of
the pool, so that it is written in place. Outside, pages have the layout that they have on CPUs.
"""

from collections.abc import Sequence

from onnx import TensorProto

from blockrelay.block_folder.model import ModelConfig
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.graphs.graph import Graph
from blockrelay_worker.kernels.specification import PAGE

#: The axes of a pool (page, slot, head, number) in the order that a page on a CPU has them, and back.
_PAGE_ORDER = {"keys": [0, 2, 3, 1], "values": [0, 2, 1, 3]}
_POOL_ORDER = {"keys": [0, 3, 1, 2], "values": [0, 2, 1, 3]}


def replaced(graph: Graph, model: ModelConfig, pool: str) -> str:
    """Makes a pool an input, and the name that is returned the output that takes its place."""
    shape = ["pages of the pool", PAGE, model.kv_heads, model.head_dim]
    graph.input(pool, graph.type, shape)
    graph.output(f"{pool}_out", graph.type, shape)
    return f"{pool}_out"


def written(graph: Graph, model: ModelConfig, pool: str, places: str, content: str) -> str:
    """A pool with `content` at the `places`, int64 [n, 1] of pages or [n, 2] of pages and slots."""
    return graph.node("ScatterND", [pool, places, content], replaced(graph, model, pool))


def export_graph(model: ModelConfig, layers: Sequence[int], dtype: FloatType, *, joined: bool = False) -> bytes:
    """Pools and `pages` int64 [p] -> `.../keys_page` [p, kv_heads, head_dim, 16] and `.../values_page` [p, kv_heads,
    16, head_dim]: what a CPU has of the same pages, in the pools' type (not every device knows both).

    `joined`: one output `contents` [p, n] instead, the same numbers behind each other, keys and values of each layer.
    """
    graph = Graph(dtype)
    graph.input("pages", TensorProto.INT64, ["p"])
    parts: list[str] = []
    for block in layers:
        for half, order in _PAGE_ORDER.items():
            pool = f"block_{block}/{half}"
            graph.input(pool, graph.type, ["pages of the pool", PAGE, model.kv_heads, model.head_dim])
            found = graph.node("Gather", [pool, "pages"], f"{pool}_found")
            found = graph.node("Transpose", [found], f"{pool}_turned", perm=order)
            if joined:
                parts.append(graph.reshape(found, [0, -1], f"{pool}_flat"))
            else:
                graph.result(f"{pool}_page", found, ["p", model.kv_heads, "d", "t"], graph.type)
    if joined:
        graph.output(graph.node("Concat", parts, "contents", axis=1), graph.type, ["p", "n"])
    return graph.serialized("export")


def import_graph(model: ModelConfig, layers: Sequence[int], dtype: FloatType) -> bytes:
    """The way back: pools, `pages` int64 [p, 1] and what an export gave -> the pools."""
    graph = Graph(dtype)
    graph.input("pages", TensorProto.INT64, ["p", 1])
    for block in layers:
        for half, order in _POOL_ORDER.items():
            pool = f"block_{block}/{half}"
            graph.input(f"{pool}_page", graph.type, ["p", model.kv_heads, "d", "t"])
            content = graph.node("Transpose", [f"{pool}_page"], f"{pool}_turned", perm=order)
            written(graph, model, pool, "pages", content)
    return graph.serialized("import")
