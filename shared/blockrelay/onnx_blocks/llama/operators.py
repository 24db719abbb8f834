"""What single operators, or a few together, are: products with weights, and norms by the root mean square."""

from collections.abc import Iterator
from dataclasses import dataclass

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.llama.graph import Constant, Graph, Node, own_name

#: They hand on the numbers of their first input, in other shapes or types.
RESHAPING = ("Cast", "CastLike", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Flatten")
_PACKED, _SKIP = "MatMulNBits", "SkipSimplifiedLayerNormalization"
_NORMS = ("SimplifiedLayerNormalization", "RMSNormalization", _SKIP)
#: What follows the mean of the squares until the weight is multiplied.
_OF_A_NORM = ("Add", "Sqrt", "Div", "Reciprocal", "Mul", "Cast", "Pow")
_DEFAULT_EPSILON, _DEFAULT_EPSILON_OF_SKIP = 1e-5, 1e-12
_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Packed:
    """How MatMulNBits has its weights: `bits` each, in groups of `group` inputs with a scale and a zero point each."""

    bits: int
    group: int
    scales: Constant
    zero_points: Constant | None


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix of `inputs` times `outputs` numbers. The constant has them as [inputs, outputs], or by `rows` as
    [outputs, inputs], or packed: [outputs, groups, bytes]."""

    constant: Constant
    rows: bool
    inputs: int
    outputs: int
    packed: Packed | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product with constant weights, and the bias that is added to it. `output` is with the bias."""

    place: int
    """Of its node in the order of the graph."""
    node: Node
    input: str
    weight: Weight
    bias: Constant | None
    output: str


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """By the root mean square, of the sum of `inputs`. `place` is that of its last node."""

    place: int
    node: Node
    inputs: tuple[str, ...]
    weight: Constant
    epsilon: float
    output: str


def constant_of(graph: Graph, name: str) -> tuple[Constant, bool] | None:
    """The constant that a tensor is, in another type perhaps, and whether it is transposed; None: it is none."""
    turned = False
    while name not in graph.constants:
        node = graph.makers.get(name)
        if node is None or node.kind not in ("Cast", "Identity", "Transpose"):
            return None
        turned ^= node.kind == "Transpose"
        name = node.input(0)
    return graph.constants[name], turned


def products(graph: Graph) -> Iterator[Product]:
    """In the order in which they run. Raises OnnxBlocksError for one whose weights are packed in a way not known."""
    for place, node in enumerate(graph.nodes):
        weight = _weight(graph, node)
        if weight is None:
            continue
        bias, output = _bias(graph, node, weight.outputs)
        yield Product(place, node, node.input(0), weight, bias, output)


def _weight(graph: Graph, node: Node) -> Weight | None:
    if node.kind == _PACKED:
        return _packed(graph, node)
    if node.kind not in ("MatMul", "Gemm") or constant_of(graph, node.input(0)) is not None:
        return None
    found = constant_of(graph, node.input(1))
    if found is None or len(found[0].shape) != 2 or 1 in found[0].shape or not found[0].is_float:
        return None
    constant, turned = found
    if node.kind == "Gemm":
        if (node.number("alpha", 1), node.number("beta", 1), node.number("transA", 0)) != (1, 1, 0):
            raise OnnxBlocksError(
                "is made by a Gemm that does more than multiply", file=node.file, tensor=own_name(node.outputs[0])
            )
        turned ^= bool(node.number("transB", 0))
    first, second = constant.shape
    return Weight(constant, turned, *((second, first) if turned else (first, second)))


def _packed(graph: Graph, node: Node) -> Weight:
    inputs, outputs = int(node.number("K", 0)), int(node.number("N", 0))
    bits, group = int(node.number("bits", 4)), int(node.number("block_size", 0))
    named = [graph.constants.get(node.input(index)) for index in (1, 2, 3)]
    weight, scales, zero_points = named
    name = own_name(node.outputs[0])
    if weight is None or scales is None or (node.input(3) and zero_points is None) or node.input(4):
        raise OnnxBlocksError("has weights that are not constants, or in an order", file=node.file, tensor=name)
    return packed_weight(weight, Packed(bits, group, scales, zero_points), inputs=inputs, outputs=outputs)


def packed_weight(weight: Constant, how: Packed, *, inputs: int, outputs: int) -> Weight:
    """Raises OnnxBlocksError for a constant that is not so many rows of such weights."""
    groups = -(-inputs // how.group) if how.group > 0 else 0
    size = outputs * groups * how.group * how.bits // 8
    is_as_declared = weight.size == size and weight.dtype == "uint8" and how.scales.size == outputs * groups
    if how.bits not in _BITS or not size or not is_as_declared or not how.scales.is_float:
        raise OnnxBlocksError(
            f"is not {outputs} rows of {inputs} weights of 4 or 8 bits in groups of {how.group}",
            file=weight.file,
            tensor=weight.name,
        )
    zero_points = how.zero_points
    if zero_points is not None:
        each = -(-groups * how.bits // 8) if zero_points.dtype == "uint8" else groups
        if zero_points.size != outputs * each:
            raise OnnxBlocksError(
                f"is not a zero point for each of {groups} groups of {outputs} rows",
                file=zero_points.file,
                tensor=zero_points.name,
            )
    return Weight(weight, True, inputs, outputs, how)


def _bias(graph: Graph, node: Node, outputs: int) -> tuple[Constant | None, str]:
    """Of a product, and the tensor that has it in it."""
    own = node.input({_PACKED: 5, "Gemm": 2}.get(node.kind, 9))
    output = node.outputs[0]
    if own:
        found = constant_of(graph, own)
        if found is None:
            raise OnnxBlocksError("has a bias that is not a constant", file=node.file, tensor=own_name(output))
        return found[0], output
    users = graph.users.get(output, ())
    if len(users) == 1 and users[0].kind == "Add":
        for name in users[0].inputs:
            found = constant_of(graph, name)
            if found is not None and found[0].size == outputs:
                return found[0], users[0].outputs[0]
    return None, output


def norms(graph: Graph) -> Iterator[Norm]:
    """In the order in which they run. Raises OnnxBlocksError for one that does more than a norm of Llama does."""
    for place, node in enumerate(graph.nodes):
        if node.kind in _NORMS:
            yield _fused_norm(graph, place, node)
        elif node.kind == "ReduceMean":
            found = _written_out(graph, node)
            if found is not None:
                yield found


def _fused_norm(graph: Graph, place: int, node: Node) -> Norm:
    skips = node.kind == _SKIP
    found = constant_of(graph, node.input(2 if skips else 1))
    name = own_name(node.outputs[0])
    if found is None or (skips and node.input(3)):
        raise OnnxBlocksError("is a norm with a bias, or without weights of its own", file=node.file, tensor=name)
    epsilon = node.number("epsilon", _DEFAULT_EPSILON_OF_SKIP if skips else _DEFAULT_EPSILON)
    return Norm(place, node, node.inputs[: 2 if skips else 1], found[0], epsilon, node.outputs[0])


def _written_out(graph: Graph, mean: Node) -> Norm | None:
    """The norm of the mean of its squares, if that is what the mean is of."""
    square = graph.makers.get(mean.input(0))
    if square is None or not (square.kind == "Pow" or (square.kind == "Mul" and len(set(square.inputs)) == 1)):
        return None
    source = square.input(0)
    while (node := graph.makers.get(source)) is not None and node.kind == "Cast":
        source = node.input(0)
    epsilon: float | None = None
    left, seen = [mean.outputs[0]], set[str]()
    while left:
        name = left.pop(0)
        for node in graph.users.get(name, ()):
            if node.kind not in _OF_A_NORM or node.outputs[0] in seen:
                continue
            seen.add(node.outputs[0])
            constants = [found[0] for each in node.inputs if (found := constant_of(graph, each)) is not None]
            if node.kind == "Add" and constants and constants[0].values:
                epsilon = constants[0].values[0]
            elif node.kind == "Mul" and constants and constants[0].size > 1:
                return Norm(graph.nodes.index(node), node, (source,), constants[0], epsilon or 0.0, node.outputs[0])
            left.append(node.outputs[0])
    return None
