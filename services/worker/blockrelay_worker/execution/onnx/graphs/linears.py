"""Linear layers: x [R, K] times [K, N], as floats or by weights that stay small, of 8 or 4 bits.

Small ones are `com.microsoft.MatMulNBits`: for each column groups of 32 unsigned numbers, around 128 or 8, that share a
factor. That is what every provider's fast kernels take, and what block folders have, so that no weight changes.

    KIND          uint8 [N, groups, 4 * bits]  of 4 bits the first of two in the low half
    KIND.scales   [N, groups], of the graph's type
"""

from onnx import TensorProto

from blockrelay.block_folder.model import GROUP, LINEARS, Precision
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.graphs.graph import MICROSOFT, Graph

#: Bits of the weights of a precision, where they are few. 0 stands for floats.
BITS: dict[Precision, int] = {"w8a8": 8, "w4a8": 4}


def is_packed(name: str, bits: int) -> bool:
    """Whether the input `name` of a block is bytes with several or scaled weights, and no floats."""
    return bits > 0 and name in LINEARS


def shapes(kind: str, rows: int, columns: int, bits: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the inputs of a layer with `rows` inputs."""
    if not bits:
        return {kind: (rows, columns)}
    groups = -(-rows // GROUP)
    return {kind: (columns, groups, GROUP * bits // 8), f"{kind}.scales": (columns, groups)}


def product(
    graph: Graph,
    x: str,
    weights: str,
    shape: tuple[int, int],
    bits: int,
    output: str,
    longest_sum: int | None = None,
) -> str:
    """x [R, K] times the layer whose inputs begin with the name `weights` and whose shape is [K, N].

    `longest_sum` as of `Flavour`.
    """
    if not bits:
        parts = parts_of(shape[0], longest_sum)
        if parts > 1:
            return _product_in_parts(graph, x, weights, shape, parts, output)
        return graph.node("MatMul", [x, weights], output)
    rows, columns = shape
    about = {"K": rows, "N": columns, "bits": bits, "block_size": GROUP}
    return graph.node("MatMulNBits", [x, weights, f"{weights}.scales"], output, domain=MICROSOFT, **about)


def parts_of(rows: int, longest_sum: int | None) -> int:
    """The fewest equal parts of at most `longest_sum` that `rows` inputs of a product are summed in, each a multiple of
    four inputs, as kernels read them; 1 where there are none."""
    if longest_sum is None:
        return 1
    fewest = -(-rows // longest_sum)
    return next((parts for parts in range(fewest, rows // 64 + 1) if rows % (4 * parts) == 0), 1)


def _product_in_parts(graph: Graph, x: str, weights: str, shape: tuple[int, int], parts: int, output: str) -> str:
    """The product as a batch of `parts` products of fewer inputs, added in float32. No weight moves: the layer is
    only seen as [parts, K / parts, N]."""
    rows, columns = shape
    each = rows // parts
    x = graph.reshape(x, [-1, parts, each], f"{output}_x", known=["R", parts, each])
    x = graph.node("Transpose", [x], f"{output}_x_by_part", perm=[1, 0, 2])
    layer = graph.reshape(weights, [parts, each, columns], f"{output}_layer", known=[parts, each, columns])
    products = graph.node("MatMul", [x, layer], f"{output}_parts")
    wide = graph.cast(products, TensorProto.FLOAT, f"{output}_wide")
    total = graph.node("ReduceSum", [wide, graph.integers(0)], f"{output}_total", keepdims=0)
    return graph.cast(total, graph.type, output)


def product_graph(rows: int, columns: int, bits: int, dtype: FloatType) -> bytes:
    """One small layer alone: `x` float32 [R, rows], `w` and `w.scales` -> `y` float32 [R, columns]."""
    graph = Graph(dtype)
    graph.input("x", TensorProto.FLOAT, ["R", rows])
    for name, shape in shapes("w", rows, columns, bits).items():
        graph.input(name, TensorProto.UINT8 if name == "w" else graph.type, shape)
    x = graph.cast("x", graph.type, "narrow")
    graph.result("y", product(graph, x, "w", (rows, columns), bits, "product"), ["R", columns])
    return graph.serialized("product")
