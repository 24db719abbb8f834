"""Recognises linear layers (with constant weights) and RMS norms, each of which may be one operator or several."""

from collections.abc import Iterator
from dataclasses import dataclass

from blockrelay.onnx_blocks.llama.graph import Constant, Graph, Node

#: Operators that return the numbers of their first input, in another shape or type.
RESHAPING = ("Cast", "CastLike", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Flatten")
_PACKED, _SKIP = "MatMulNBits", "SkipSimplifiedLayerNormalization"
_NORMS = ("SimplifiedLayerNormalization", "RMSNormalization", _SKIP)
#: Operators between the mean of the squares and the multiplication by the weight.
_OF_A_NORM = ("Add", "Sqrt", "Div", "Reciprocal", "Mul", "Cast", "Pow")
_DEFAULT_EPSILON, _DEFAULT_EPSILON_OF_SKIP = 1e-5, 1e-12
_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Packed:
    """The packing of quantised weights, as in ONNX Runtime's MatMulNBits."""

    bits: int
    """Bits of each weight."""
    group: int
    """Consecutive inputs that share a scale and a zero point."""
    scales: Constant
    zero_points: Constant | None


@dataclass(frozen=True, slots=True)
class Weight:
    """The matrix of a linear layer, with `inputs` times `outputs` weights."""

    constant: Constant
    rows: bool
    """True if the constant is [outputs, inputs], and False if it is [inputs, outputs]."""
    inputs: int
    outputs: int
    packed: Packed | None = None
    """The packing, if the constant is quantised: [outputs, groups, bytes]."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearLayer:
    """A linear layer: a matmul with constant weights, and the bias that is added to it."""

    place: int
    """Index of the matmul's node in the order of the graph."""
    node: Node
    input: str
    weight: Weight
    bias: Constant | None
    output: str
    """The tensor with the bias added."""


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """An RMS norm, of the sum of `inputs`."""

    place: int
    """Index of its last node in the order of the graph."""
    node: Node
    """Its last node."""
    inputs: tuple[str, ...]
    """One tensor, or two if the norm adds the residual itself."""
    weight: Constant
    epsilon: float
    """0 if a norm of several operators adds none."""
    output: str


def constant_of(graph: Graph, name: str) -> tuple[Constant, bool] | None:
    """Returns the constant that the tensor `name` is, and whether it is transposed; None if it is no constant.

    The tensor may have been cast to another type.
    """
    transposed = False
    while name not in graph.constants:
        node = graph.makers.get(name)
        if node is None or node.kind not in ("Cast", "Identity", "Transpose"):
            return None
        transposed ^= node.kind == "Transpose"
        name = node.input(0)
    return graph.constants[name], transposed


def linear_layers(graph: Graph) -> Iterator[LinearLayer]:
    """Yields the linear layers in the order in which they run.

    A matmul by a constant with a dimension of 1, or by one that is not of floats, is none. Raises OnnxBlocksError
    for one whose weights or bias cannot be read.
    """
    for place, node in enumerate(graph.nodes):
        weight = _weight(graph, node)
        if weight is None:
            continue
        bias, output = _bias(graph, node, weight.outputs)
        yield LinearLayer(place, node, node.input(0), weight, bias, output)


def _weight(graph: Graph, node: Node) -> Weight | None:
    """Returns the weight of a node that is a linear layer; None for other nodes."""
    if node.kind == _PACKED:
        return _packed(graph, node)
    if node.kind not in ("MatMul", "Gemm") or constant_of(graph, node.input(0)) is not None:
        return None
    source = constant_of(graph, node.input(1))
    if source is None or len(source[0].shape) != 2 or 1 in source[0].shape or not source[0].is_float:
        return None
    constant, transposed = source
    if node.kind == "Gemm":
        if (node.number("alpha", 1), node.number("beta", 1), node.number("transA", 0)) != (1, 1, 0):
            raise node.error("is made by a Gemm that does more than multiply")
        transposed ^= bool(node.number("transB", 0))
    first, second = constant.shape
    return Weight(constant, transposed, *((second, first) if transposed else (first, second)))


def _packed(graph: Graph, node: Node) -> Weight:
    inputs, outputs = int(node.number("K", 0)), int(node.number("N", 0))
    bits, group = int(node.number("bits", 4)), int(node.number("block_size", 0))
    weight, scales, zero_points = [graph.constants.get(node.input(index)) for index in (1, 2, 3)]
    if weight is None or scales is None or (node.input(3) and zero_points is None) or node.input(4):
        raise node.error("has weights that are not constants, or in an order")
    return packed_weight(weight, Packed(bits, group, scales, zero_points), inputs=inputs, outputs=outputs)


def packed_weight(weight: Constant, how: Packed, *, inputs: int, outputs: int) -> Weight:
    """Returns the weight that the constant `weight`, packed as `how`, holds.

    Raises OnnxBlocksError if the sizes and dtypes of its constants do not fit `inputs` and `outputs`.
    """
    groups = -(-inputs // how.group) if how.group > 0 else 0
    size = outputs * groups * how.group * how.bits // 8
    is_as_declared = weight.size == size and weight.dtype == "uint8" and how.scales.size == outputs * groups
    if how.bits not in _BITS or not size or not is_as_declared or not how.scales.is_float:
        raise weight.error(f"is not {outputs} rows of {inputs} weights of 4 or 8 bits in groups of {how.group}")
    zero_points = how.zero_points
    if zero_points is not None:
        each = -(-groups * how.bits // 8) if zero_points.dtype == "uint8" else groups
        if zero_points.size != outputs * each:
            raise zero_points.error(f"is not a zero point for each of {groups} groups of {outputs} rows")
    return Weight(weight, True, inputs, outputs, how)


def _bias(graph: Graph, node: Node, outputs: int) -> tuple[Constant | None, str]:
    """Returns the bias of a linear layer, if it has one, and the tensor with the bias added.

    The bias may be an input of the node, or added by the node behind it.
    """
    own = node.input({_PACKED: 5, "Gemm": 2}.get(node.kind, 9))
    output = node.outputs[0]
    if own:
        bias = constant_of(graph, own)
        if bias is None:
            raise node.error("has a bias that is not a constant")
        return bias[0], output
    users = graph.users.get(output, ())
    if len(users) == 1 and users[0].kind == "Add":
        for name in users[0].inputs:
            bias = constant_of(graph, name)
            if bias is not None and bias[0].size == outputs:
                return bias[0], users[0].outputs[0]
    return None, output


def norms(graph: Graph) -> Iterator[RmsNorm]:
    """Yields the RMS norms, in the order of their operators, or of the ReduceMean in those of several operators.

    Raises OnnxBlocksError for one that does more than a norm of Llama.
    """
    for place, node in enumerate(graph.nodes):
        if node.kind in _NORMS:
            yield _fused_norm(graph, place, node)
        elif node.kind == "ReduceMean":
            norm = _written_out(graph, node)
            if norm is not None:
                yield norm


def _fused_norm(graph: Graph, place: int, node: Node) -> RmsNorm:
    """Returns the norm that one operator computes."""
    skips = node.kind == _SKIP
    weight = constant_of(graph, node.input(2 if skips else 1))
    if weight is None or (skips and node.input(3)):
        raise node.error("is a norm with a bias, or without weights of its own")
    epsilon = node.number("epsilon", _DEFAULT_EPSILON_OF_SKIP if skips else _DEFAULT_EPSILON)
    return RmsNorm(place, node, node.inputs[: 2 if skips else 1], weight[0], epsilon, node.outputs[0])


def _written_out(graph: Graph, mean: Node) -> RmsNorm | None:
    """Returns the norm that several operators compute, if `mean` is the mean of squares in it; else None."""
    square = graph.makers.get(mean.input(0))
    if square is None or not (square.kind == "Pow" or (square.kind == "Mul" and len(set(square.inputs)) == 1)):
        return None
    source = square.input(0)
    while (node := graph.makers.get(source)) is not None and node.kind == "Cast":
        source = node.input(0)
    epsilon: float | None = None
    queue, seen = [mean.outputs[0]], set[str]()
    while queue:
        name = queue.pop(0)
        for node in graph.users.get(name, ()):
            if node.kind not in _OF_A_NORM or node.outputs[0] in seen:
                continue
            seen.add(node.outputs[0])
            sources = (constant_of(graph, each) for each in node.inputs)
            constants = [constant for constant, _ in filter(None, sources)]
            if node.kind == "Add" and constants and constants[0].values:
                epsilon = constants[0].values[0]
            elif node.kind == "Mul" and constants and constants[0].size > 1:
                return RmsNorm(graph.nodes.index(node), node, (source,), constants[0], epsilon or 0.0, node.outputs[0])
            queue.append(node.outputs[0])
    return None
