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


def product(graph: Graph, x: str, weights: str, shape: tuple[int, int], bits: int, output: str) -> str:
    """x [R, K] times the layer whose inputs begin with the name `weights` and whose shape is [K, N]."""
    if not bits:
        return graph.node("MatMul", [x, weights], output)
    rows, columns = shape
    about = {"K": rows, "N": columns, "bits": bits, "block_size": GROUP}
    return graph.node("MatMulNBits", [x, weights, f"{weights}.scales"], output, domain=MICROSOFT, **about)


def product_graph(rows: int, columns: int, bits: int, dtype: FloatType) -> bytes:
    """One small layer alone: `x` float32 [R, rows], `w` and `w.scales` -> `y` float32 [R, columns]."""
    graph = Graph(dtype)
    graph.input("x", TensorProto.FLOAT, ["R", rows])
    for name, shape in shapes("w", rows, columns, bits).items():
        graph.input(name, TensorProto.UINT8 if name == "w" else graph.type, shape)
    x = graph.cast("x", graph.type, "narrow")
    graph.result("y", product(graph, x, "w", (rows, columns), bits, "product"), ["R", columns])
    return graph.serialized("product")
