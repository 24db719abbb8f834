"""The graph of a whole model as data: nodes, the tensors that they read and compute, and the widths of these."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.signature import Tensor

#: The operator that reads only the dimensions of a tensor.
SHAPE = "Shape"
#: Operators that take most of the time: standard names, and words in the names of others.
_PRODUCTS, _PRODUCT_WORDS = ("Gemm", "Einsum", "Conv"), ("MatMul", "Attention", "MoE")


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of the graph. Absent optional tensors, which have empty names in ONNX, are left out."""

    index: int
    """Its position in the file, from 0."""
    kind: str
    """The operator, such as `MatMul`."""
    inputs: tuple[str, ...]
    """Names of the tensors that it reads, with those that graphs inside the node read."""
    outputs: tuple[str, ...]

    @property
    def is_product(self) -> bool:
        """True for operators that take most of the time: matmuls, einsums, convolutions, attention and MoE."""
        return any(word in self.kind for word in _PRODUCT_WORDS) or self.kind in _PRODUCTS


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGraph:
    """A whole model. Its nodes are in running order: each comes after those that compute its inputs."""

    file: str
    """Name of the model's file, for error messages."""
    nodes: Sequence[GraphNode]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    constants: Collection[str]
    """Names of the initializers: weights and other tensors that the file holds."""
    widths: Mapping[str, int]
    """Numbers per token of each tensor for which the count is known."""

    def makers(self) -> Mapping[str, GraphNode]:
        """Returns the node that computes each tensor, by the tensor's name."""
        return {name: node for node in self.nodes for name in node.outputs}

    def all_widths(self) -> Mapping[str, int]:
        """Returns the width (numbers per token) of every computed tensor; at least 1.

        A tensor with an unknown width counts as wide as the widest tensor that its node reads, constants aside.
        """
        widths = dict(self.widths)
        for node in self.nodes:
            widest = max((widths.get(name, 0) for name in node.inputs if name not in self.constants), default=0)
            for name in node.outputs:
                widths[name] = max(1, widths.get(name) or widest)
        return widths


def in_running_order(
    file: str, nodes: Sequence[GraphNode], given: Collection[str], wanted: Iterable[str]
) -> tuple[GraphNode, ...]:
    """Returns the nodes sorted so that each comes after those that compute its inputs.

    A file that is sorted already keeps its order. `file` is its name, for errors. `given` are the names of inputs and
    constants, `wanted` those of outputs. Raises OnnxBlocksError, with the tensor, for one that two nodes compute, or
    that a node computes although it is in `given`. Also raises it for one that no node computes and that is not in
    `given`, and for a cycle.
    """
    makers: dict[str, GraphNode] = {}
    for node in nodes:
        for name in node.outputs:
            if name in makers or name in given:
                raise OnnxBlocksError("is made twice", file=file, tensor=name)
            makers[name] = node
    for name in (*(name for node in nodes for name in node.inputs), *wanted):
        if name not in makers and name not in given:
            raise OnnxBlocksError("is made by no node: the file is a part of a graph", file=file, tensor=name)
    made = set(given)
    for node in nodes:
        if not made.issuperset(node.inputs):
            break
        made.update(node.outputs)
    else:
        return tuple(nodes)
    sorter = TopologicalSorter(
        {node.index: [makers[name].index for name in node.inputs if name in makers] for node in nodes}
    )
    by_index = {node.index: node for node in nodes}
    try:
        return tuple(by_index[index] for index in sorter.static_order())
    except CycleError as error:
        first = by_index[error.args[1][0]]
        raise OnnxBlocksError("is in a cycle: it is made from itself", file=file, tensor=first.outputs[0]) from None
