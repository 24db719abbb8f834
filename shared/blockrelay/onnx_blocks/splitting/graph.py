"""The graph of a whole model as data: what its nodes read and make, and how wide that is."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.signature import Tensor

#: The operator that looks at how long a tensor is and not at what is in it.
SHAPE = "Shape"
#: What operators that take most of the time are called, of the standard and others.
_PRODUCTS, _PRODUCT_WORDS = ("Gemm", "Einsum", "Conv"), ("MatMul", "Attention", "MoE")


@dataclass(frozen=True, slots=True)
class Node:
    """`index` is its place in the file. `inputs` and `outputs` are without the empty names of optional tensors that are
    not there, and `inputs` are with those that graphs inside the node read."""

    index: int
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def is_product(self) -> bool:
        """Whether it takes most of the time: products with weights, and attention."""
        return any(word in self.kind for word in _PRODUCT_WORDS) or self.kind in _PRODUCTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Every node is behind those that make what it reads (`in_running_order`)."""

    file: str
    nodes: Sequence[Node]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    constants: Collection[str]
    widths: Mapping[str, int]
    """How many numbers a tensor has for each token; only of those that are known."""

    def makers(self) -> Mapping[str, Node]:
        """The node that makes each tensor."""
        return {name: node for node in self.nodes for name in node.outputs}

    def all_widths(self) -> Mapping[str, int]:
        """Of every tensor that nodes make: if nothing else is known, as wide as the widest that it is made of."""
        found = dict(self.widths)
        for node in self.nodes:
            widest = max((found.get(name, 0) for name in node.inputs if name not in self.constants), default=0)
            for name in node.outputs:
                found[name] = max(1, found.get(name) or widest)
        return found


def in_running_order(
    file: str, nodes: Sequence[Node], given: Collection[str], wanted: Iterable[str]
) -> tuple[Node, ...]:
    """The nodes, each behind those that make what it reads: as they are in the file where that is so already.

    `given` are inputs and constants, `wanted` outputs. Raises OnnxBlocksError that names the tensor for one that is
    made twice or by nobody, and for a cycle.
    """
    makers: dict[str, Node] = {}
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
