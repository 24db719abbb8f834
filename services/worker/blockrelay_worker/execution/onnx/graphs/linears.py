"""Linear layers: x [R, K] times [K, N], with weights as floats, or small ones of 8 or 4 bits.

Small weights are `com.microsoft.MatMulNBits`: each column has groups of 32 unsigned numbers around 128 or 8, and each
group one scale. All providers' fast kernels take this format. The minimum of a group of 4 bits is added to the product:
each of its weights is (nibble - 8) * scale and a number that all 32 share, which multiplies the sum of their inputs.

    KIND            uint8 [N, groups, 4 * bits]  with 4 bits, the first of two weights is in the low half
    KIND.scales     [N, groups], of the graph's type
    KIND.minimums   [groups, N], of the graph's type, for 4 bits: what a group's weights share, minimum + 8 * scale
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from blockrelay.block_folder.model import GROUP, LINEARS, Precision
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.graphs.graph import MICROSOFT, GraphBuilder

#: Bits of a precision's small weights. 0 stands for floats.
BITS: dict[Precision, int] = {"w8a8": 8, "w4a8": 4}


class BlockForm(NamedTuple):
    """The form of a block's linear layers on a device."""

    bits: int = 0
    """Bits (8 or 4) of small weights; 0: the weights are floats."""
    hadamard: int = 0
    """Size of the Hadamard matrices by which the input of `down` is multiplied (`hadamard_size`); 0: none."""


#: A block with float weights and no Hadamard step.
PLAIN_FORM = BlockForm()


def is_packed(name: str, bits: int) -> bool:
    """Returns whether the input `name` of a block holds small weights as bytes, and not floats."""
    return bits > 0 and name in LINEARS


def shapes(kind: str, rows: int, columns: int, bits: int) -> dict[str, tuple[int, ...]]:
    """Returns the inputs of a linear layer [rows, columns]: name -> shape. `bits` 0: floats. For 4 bits, `rows` must be
    a multiple of GROUP."""
    if not bits:
        return {kind: (rows, columns)}
    groups = -(-rows // GROUP)
    inputs = {kind: (columns, groups, GROUP * bits // 8), f"{kind}.scales": (columns, groups)}
    return inputs | ({f"{kind}.minimums": (groups, columns)} if bits == 4 else {})


def matmul(
    graph: GraphBuilder,
    x: str,
    weights: str,
    shape: tuple[int, int],
    bits: int,
    output: str,
    longest_sum: int | None = None,
    count: str = "R",
) -> str:
    """Adds x [R, K] times the layer [K, N] = `shape`, whose inputs' names begin with `weights`. Returns `output`, [R,
    N].

    `bits`: 8 or 4 of small weights, 0 for floats. `longest_sum`, for floats only: a sum over more than this many inputs
    is computed in parts (`parts_of`), which are added in float32; None: in one piece. `count` is the name of R.
    """
    if not bits:
        parts = parts_of(shape[0], longest_sum)
        if parts > 1:
            return _matmul_in_parts(graph, x, weights, shape, parts, output, count)
        return graph.node("MatMul", [x, weights], output)
    rows, columns = shape
    about = {"K": rows, "N": columns, "bits": bits, "block_size": GROUP}
    around = output if bits == 8 else f"{output}_around_8"
    product = graph.node("MatMulNBits", [x, weights, f"{weights}.scales"], around, domain=MICROSOFT, **about)
    if bits == 8:
        return product
    groups = rows // GROUP
    x = graph.reshape(x, [-1, groups, GROUP], f"{output}_groups", known=[count, groups, GROUP])
    sums = graph.node("ReduceSum", [x, graph.integers(-1)], f"{output}_sums", keepdims=0)
    shared = graph.node("MatMul", [sums, f"{weights}.minimums"], f"{output}_shared")
    return graph.node("Add", [product, shared], output)


def hadamard_unit(size: int) -> float:
    """Returns the power of two, near 1 / sqrt(size), that a device multiplies a Hadamard matrix by.

    Without it, sums of large numbers would leave the range of float16. The weights behind are divided by it. It is 1
    for size 0.
    """
    return 2.0 ** -(size.bit_length() // 2)


def hadamard(graph: GraphBuilder, x: str, columns: int, size: int, output: str) -> str:
    """Adds the product of each `size` neighbours in a row of x [R, columns] with a Hadamard matrix times its unit.

    Returns `output`. The matrix is a constant that all layers share.
    """
    matrix: NDArray[np.floating[Any]] = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    constant = graph.constant(f"hadamard {size}", (matrix * hadamard_unit(size)).astype(graph.dtype))
    x = graph.reshape(x, [-1, columns // size, size], f"{output}_blocks", known=["R", columns // size, size])
    product = graph.node("MatMul", [x, constant], f"{output}_product")
    return graph.reshape(product, [-1, columns], output, known=["R", columns])


def parts_of(rows: int, longest_sum: int | None) -> int:
    """Returns the fewest equal parts of at most `longest_sum` in which `rows` inputs of a matmul can be summed.

    Each part has 64 inputs or more, and a multiple of four, as kernels read them. 1 if there is no such division, or no
    `longest_sum`."""
    if longest_sum is None:
        return 1
    fewest = -(-rows // longest_sum)
    return next((parts for parts in range(fewest, rows // 64 + 1) if rows % (4 * parts) == 0), 1)


def _matmul_in_parts(
    graph: GraphBuilder, x: str, weights: str, shape: tuple[int, int], parts: int, output: str, count: str
) -> str:
    """Adds the matmul as a batch of `parts` matmuls with fewer inputs, summed in float32. No weight moves: the layer is
    only seen as [parts, K / parts, N]."""
    rows, columns = shape
    each = rows // parts
    x = graph.reshape(x, [-1, parts, each], f"{output}_x", known=[count, parts, each])
    x = graph.node("Transpose", [x], f"{output}_x_by_part", perm=[1, 0, 2])
    layer = graph.reshape(weights, [parts, each, columns], f"{output}_layer", known=[parts, each, columns])
    products = graph.node("MatMul", [x, layer], f"{output}_parts")
    wide = graph.cast(products, TensorProto.FLOAT, f"{output}_wide")
    total = graph.node("ReduceSum", [wide, graph.integers(0)], f"{output}_total", keepdims=0)
    return graph.cast(total, graph.type, output)


def matmul_graph(rows: int, columns: int, bits: int, dtype: FloatType) -> bytes:
    """Returns one linear layer alone as a serialised model: `x` float32 [R, rows] and the inputs that `shapes` has for
    `w` -> `y` float32 [R, columns]. `bits` is 8 or 4: it is only for small weights."""
    graph = GraphBuilder(dtype)
    graph.input("x", TensorProto.FLOAT, ["R", rows])
    for name, shape in shapes("w", rows, columns, bits).items():
        graph.input(name, TensorProto.UINT8 if name == "w" else graph.type, shape)
    x = graph.cast("x", graph.type, "narrow")
    graph.result("y", matmul(graph, x, "w", (rows, columns), bits, "product"), ["R", columns])
    return graph.serialized("product")
