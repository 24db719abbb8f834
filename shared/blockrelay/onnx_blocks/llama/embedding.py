"""Finds the embedding: the table in which a graph looks up tokens.

The table may be plain, transposed, or packed (a model that uses the head's packed weights as the embedding too).
"""

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.llama.graph import Constant, Graph, Node
from blockrelay.onnx_blocks.llama.operators import Packed, Weight, constant_of, packed_weight
from blockrelay.onnx_blocks.llama.trails import Sources

_PLAIN, _PACKED = "Gather", "GatherBlockQuantized"


def embedding(graph: Graph, sources: Sources, *, file: str, hidden: int) -> Constant | Weight:
    """Returns the embedding: a constant [tokens, hidden], or a weight of `hidden` inputs and an output for each token.

    It is a weight if the table is transposed or packed. `sources` traces tensors back, `hidden` is the width of a row.
    Raises OnnxBlocksError if the table cannot be read, and with `file` if the graph looks up no tokens.
    """
    for node in graph.nodes:
        if node.kind.startswith(_PLAIN) and sources.same(node.input(1)) == "request:input_ids":
            table = _packed(graph, sources, node, hidden) if node.kind == _PACKED else _plain(graph, node)
            if table is None:
                raise node.error("is looked up in a table that is not one of floats, nor of 4 or 8 bits in groups")
            return table
    raise OnnxBlocksError("looks no input_ids up in a table", file=file)


def _plain(graph: Graph, node: Node) -> Constant | Weight | None:
    """Returns the table of floats that a Gather looks tokens up in; None if it is something else."""
    table = constant_of(graph, node.input(0)) if node.number("axis", 0) == 0 else None
    if node.kind != _PLAIN or table is None or len(table[0].shape) != 2 or not table[0].is_float:
        return None
    constant, transposed = table
    first, second = constant.shape
    return Weight(constant, False, first, second) if transposed else constant


def _packed(graph: Graph, sources: Sources, node: Node, hidden: int) -> Weight | None:
    """Returns the packed table that a GatherBlockQuantized looks tokens up in; None if it is packed in another way."""
    table = graph.constants.get(sources.same(node.input(0)))
    scales = graph.constants.get(sources.same(node.input(2)))
    zero_points = graph.constants.get(sources.same(node.input(3))) if node.input(3) else None
    by_rows = (node.number("gather_axis", 0), node.number("quantize_axis", 1)) == (0, 1)
    if table is None or scales is None or not table.shape or not by_rows or (node.input(3) and zero_points is None):
        return None
    how = Packed(int(node.number("bits", 4)), int(node.number("block_size", 0)), scales, zero_points)
    return packed_weight(table, how, inputs=hidden, outputs=table.shape[0])
