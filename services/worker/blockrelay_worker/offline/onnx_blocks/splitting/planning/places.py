"""Decides which block each node is in, for the nodes whose outputs change with the model's inputs.

A node that depends on tokens or on a past is in the block between whose borders it lies. A node that depends only on
masks, positions and lengths is in the first block that needs it, or in block 1 if it reads an input of the request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from blockrelay.onnx_blocks.cache_names import CacheSlot
from blockrelay_worker.offline.onnx_blocks.splitting.planning.borders import Borders
from blockrelay_worker.offline.onnx_blocks.splitting.planning.caches import Caches, Dependence
from blockrelay_worker.offline.onnx_blocks.splitting.planning.graph import SHAPE, GraphNode, WholeGraph

#: Operators that compute a few numbers from lengths: as cheap to repeat in each block as to send between blocks.
_ARITHMETIC = frozenset(
    (
        *("Add", "Cast", "Concat", "Div", "Gather", "Identity", "Max", "Min", "Mul", "Neg"),
        *("Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze"),
    )
)


@dataclass(slots=True)
class Places:
    """The block of every node that changes with the inputs and that an output depends on."""

    graph: WholeGraph
    caches: Caches
    depends: Dependence
    borders: Borders
    makers: Mapping[str, GraphNode] = field(init=False)
    """The node that computes each tensor, by the tensor's name."""
    block: dict[int, int] = field(init=False)
    """The block of each node, both from 0, by the index of the node in the file."""
    of_lengths: set[int] = field(default_factory=set[int])
    """Indexes of the nodes that depend only on lengths of pasts: each block can have its own copy."""

    def __post_init__(self) -> None:
        self.makers = self.graph.makers()
        self.block = dict(self.borders.hidden_blocks)
        self._find_lengths()
        self._place_the_rest()

    def is_fixed(self, node: GraphNode) -> bool:
        """Returns whether the node's outputs are the same for all inputs."""
        return not any(name in self.depends.live for name in node.inputs)

    def is_length_of_past(self, node: GraphNode) -> bool:
        """Returns whether the node reads the dimensions of a past."""
        return node.kind == SHAPE and any(name in self.caches.pasts for name in node.inputs)

    def own_past(self, name: str, block: int) -> str:
        """Returns the name of the past of `block` (from 0) with the same half (keys or values) as the past `name`.

        Both are equally long. `name` must be a past, and `block` must have a layer: it is not the head.
        """
        return self.caches.past(CacheSlot(block, self.caches.pasts[name].half))

    def _find_lengths(self) -> None:
        for node in self.graph.nodes:
            made_by = [self.makers.get(name) for name in node.inputs if name in self.depends.live]
            if self.is_length_of_past(node) or (
                node.kind in _ARITHMETIC
                and made_by
                and all(maker is not None and maker.index in self.of_lengths for maker in made_by)
            ):
                self.of_lengths.add(node.index)

    def _place_the_rest(self) -> None:
        """Puts each node without a block into the first block that needs it, but not before its inputs are there.

        Goes from the last node to the first, so that the readers of a node's outputs have their blocks.
        """
        earliest = self._earliest()
        needed: dict[str, int] = {tensor.name: 0 for tensor in self.graph.outputs}
        request = {tensor.name for tensor in self.graph.inputs if tensor.name not in self.caches.pasts}
        for node in reversed(self.graph.nodes):
            if self.is_fixed(node):
                continue
            if node.index not in self.block:
                readers = [needed[name] for name in node.outputs if name in needed]
                if not readers:
                    continue
                first, wanted = earliest[node.index], min(readers)
                if first == 0 and any(name in request for name in node.inputs):
                    wanted = 0
                if self.is_length_of_past(node):
                    wanted = min(wanted, self.caches.layers - 1)
                self.block[node.index] = max(first, wanted)
            block = self.block[node.index]
            for name in node.inputs:
                needed[name] = min(needed.get(name, block), block)

    def _earliest(self) -> Mapping[int, int]:
        """Returns the first block in which each node has its inputs, by the index of the node."""
        earliest: dict[int, int] = {}
        for node in self.graph.nodes:
            makers = [self.makers[name] for name in node.inputs if name in self.makers]
            first = max((earliest[maker.index] for maker in makers), default=0)
            earliest[node.index] = self.block.get(node.index, first)
        return earliest
