"""The graphs that select from rows of logits on the device. Each takes `logits` float32 [R, vocab] and `which` int64
[n], the rows to select from.

    best     id int64 [n]: the largest logit; of equal ones the first
    largest  value float32 [n, k] and id int64 [n, k]: the k largest in descending order, of equal ones the first; and
             total float32 [n]: the sum of exp((logit - largest) * inverse), with `inverse` float32 [n, 1]
    rows     row float32 [n, vocab]

The first two also give `sum` float32 [n] of the row's logits, which is NaN or infinite if one of them is.
"""

from onnx import TensorProto

from blockrelay_worker.execution.onnx.graphs.graph import GraphBuilder

#: Numbers added at once: with partial sums, float32 is exact enough for a large vocabulary.
_SUMMED = 512


def best_graph(vocabulary: int) -> bytes:
    """Returns the model `best` for this vocabulary size."""
    graph, taken = _taken(vocabulary)
    graph.output(graph.node("ArgMax", [taken], "id", axis=-1, keepdims=0), TensorProto.INT64, ["n"])
    _sum(graph, taken)
    return graph.serialized("best")


def largest_graph(vocabulary: int, count: int) -> bytes:
    """Returns the model `largest`, with k = `count`, at most `vocabulary`, for this vocabulary size."""
    graph, taken = _taken(vocabulary)
    graph.input("inverse", TensorProto.FLOAT, ["n", 1])
    graph.nodes("TopK", [taken, graph.integers(count)], ["value", "id"], axis=-1, largest=1, sorted=1)
    graph.output("value", TensorProto.FLOAT, ["n", count])
    graph.output("id", TensorProto.INT64, ["n", count])
    best = graph.node("ReduceMax", [taken, graph.integers(-1)], "best", keepdims=1)
    scaled = graph.node("Mul", [graph.node("Sub", [taken, best], "behind"), "inverse"], "scaled")
    weights = graph.node("Exp", [scaled], "weights")
    if rest := -vocabulary % _SUMMED:
        weights = graph.node("Pad", [weights, graph.integers(0, 0, 0, rest)], "padded")
    weights = graph.reshape(weights, [0, -1, _SUMMED], "parts")
    parts = graph.node("ReduceSum", [weights, graph.integers(-1)], "part_totals", keepdims=0)
    graph.output(graph.node("ReduceSum", [parts, graph.integers(-1)], "total", keepdims=0), TensorProto.FLOAT, ["n"])
    _sum(graph, taken)
    return graph.serialized("largest")


def rows_graph(vocabulary: int) -> bytes:
    """Returns the model `rows` for this vocabulary size."""
    graph, taken = _taken(vocabulary)
    graph.output(taken, TensorProto.FLOAT, ["n", vocabulary])
    return graph.serialized("rows")


def _taken(vocabulary: int) -> tuple[GraphBuilder, str]:
    """Returns a graph with its inputs declared, and the name of the selected rows."""
    graph = GraphBuilder("float32")
    graph.input("logits", TensorProto.FLOAT, ["R", vocabulary])
    graph.input("which", TensorProto.INT64, ["n"])
    return graph, graph.node("Gather", ["logits", "which"], "row")


def _sum(graph: GraphBuilder, taken: str) -> None:
    graph.output(graph.node("ReduceSum", [taken, graph.integers(-1)], "sum", keepdims=0), TensorProto.FLOAT, ["n"])
