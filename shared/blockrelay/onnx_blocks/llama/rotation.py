"""Finds the rotary embedding of queries and keys: the frequencies, or tables of cos and sin, in a graph."""

from collections.abc import Iterator

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.llama.graph import Constant, Graph, Node
from blockrelay.onnx_blocks.llama.model import Frequencies, RotationTables
from blockrelay.onnx_blocks.llama.operators import constant_of

_ATTENTION, _ROTARY = "GroupQueryAttention", "RotaryEmbedding"
#: Inputs of operators that are the tables of cos and sin: of ONNX Runtime's own, and of the standard's (X, cos, sin,
#: ids).
_TABLES = {_ATTENTION: ((7, 8),), _ROTARY: ((2, 3), (1, 2))}


def rotation(graph: Graph, *, file: str, head_dim: int) -> Frequencies | RotationTables:
    """Returns the frequencies or tables by which the graph rotates heads of width `head_dim`.

    The tables may be swapped if the graph itself rotates, without an operator for that (`RotationTables`). Raises
    OnnxBlocksError for a rotation that is not Llama's, and with `file` if there is none.
    """
    for node in graph.nodes:
        tables = _of_operator(graph, node, head_dim)
        if tables is not None:
            return tables
    for node in graph.nodes:
        if node.kind == "Cos":
            return _of_cosine(graph, node, head_dim)
    gathered = list(_gathered(graph, head_dim))
    if len(gathered) == 2:
        return RotationTables(*gathered)  # in either order: only their numbers show which one is cos
    raise OnnxBlocksError("has no frequencies and no tables of a rotation, as Llama has them", file=file)


def tensors_behind_cosines(graph: Graph) -> frozenset[str]:
    """Returns all tensors that cosines and sines are computed from. A matmul among them is no linear layer."""
    return frozenset(graph.behind(*(node.input(0) for node in graph.nodes if node.kind in ("Cos", "Sin"))))


def _of_operator(graph: Graph, node: Node, head_dim: int) -> RotationTables | None:
    """Returns the tables of an operator that rotates; None for other operators."""
    if node.kind == _ATTENTION:
        if node.number("local_window_size", -1) > 0:
            raise node.error("attends to a window of positions only")
        if not node.number("do_rotary", 0):
            return None
    elif node.kind != _ROTARY:
        return None
    interleaved = node.number("rotary_interleaved" if node.kind == _ATTENTION else "interleaved", 0)
    if interleaved or node.number("rotary_embedding_dim", 0) not in (0, head_dim):
        raise node.error("rotates neighbours, or a part of each head: Llama does not")
    for places in _TABLES[node.kind]:
        cos, sin = (constant_of(graph, node.input(place)) for place in places)
        if cos is not None and sin is not None:
            for constant, _ in (cos, sin):
                if len(constant.shape) != 2 or constant.shape[1] != head_dim // 2:
                    raise constant.error(f"is not a table of {head_dim // 2} columns")
            return RotationTables(cos[0], sin[0])
    raise node.error("rotates by tables that are not constants")


def _of_cosine(graph: Graph, node: Node, head_dim: int) -> Frequencies:
    """Returns the frequencies that the cosine `node` is computed from."""
    constants = (graph.constants.get(name) for name in graph.behind(node.input(0)))
    candidates = [each for each in constants if each is not None and each.is_float and each.size == head_dim // 2]
    if len(candidates) != 1:
        raise node.error(
            f"is a cosine of {len(candidates)} tensors of {head_dim // 2} frequencies, where Llama has one"
        )
    return Frequencies(candidates[0], _factor(graph, node))


def _factor(graph: Graph, node: Node) -> float:
    """Returns the number by which the cosine `node` is multiplied (the scaling of attention); 1 if there is none."""
    output = node.outputs[0]
    for user in graph.users.get(output, ()):
        if user.kind == "Cast":
            return _factor(graph, user)
        if user.kind == "Mul":
            for name in user.inputs:
                source = constant_of(graph, name)
                if source is not None and source[0].size == 1 and source[0].values:
                    return source[0].values[0]
    return 1.0


def _gathered(graph: Graph, head_dim: int) -> Iterator[Constant]:
    """Yields the tables that a graph looks up by position, each once."""
    seen: set[str] = set()
    for node in graph.nodes:
        source = constant_of(graph, node.input(0)) if node.kind == "Gather" else None
        if source is None or node.input(1) == "request:input_ids":
            continue
        constant = source[0]
        wide = constant.is_float and len(constant.shape) == 2 and constant.shape[1] in (head_dim, head_dim // 2)
        if wide and constant.name not in seen:
            seen.add(constant.name)
            yield constant
