"""Which block each node of a model is in that changes with the inputs.

What tokens or a past go through is in the block that its border puts it in. What is made of masks, positions and
lengths alone is made once, in the first block that needs it; in block 1 where it looks at what a request brings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from blockrelay.onnx_blocks.cache_names import CacheSlot
from blockrelay.onnx_blocks.splitting.borders import Borders
from blockrelay.onnx_blocks.splitting.caches import Caches, Dependence
from blockrelay.onnx_blocks.splitting.graph import SHAPE, Graph, Node

#: Of lengths they make a few numbers, as cheap in each block as handing them on.
_ARITHMETIC = frozenset(
    (
        *("Add", "Cast", "Concat", "Div", "Gather", "Identity", "Max", "Min", "Mul", "Neg"),
        *("Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze"),
    )
)


@dataclass(slots=True)
class Places:
    """The block of every node that changes with the inputs and that somebody needs, by its place in the file."""

    graph: Graph
    caches: Caches
    depends: Dependence
    borders: Borders
    makers: Mapping[str, Node] = field(init=False)
    block: dict[int, int] = field(init=False)
    of_lengths: set[int] = field(default_factory=set[int])
    """The nodes that each block can have a copy of."""

    def __post_init__(self) -> None:
        self.makers = self.graph.makers()
        self.block = dict(self.borders.hidden_blocks)
        self._find_lengths()
        self._place_the_rest()

    def is_fixed(self, node: Node) -> bool:
        """Whether it makes the same whatever the inputs are."""
        return not any(name in self.depends.live for name in node.inputs)

    def is_length_of_past(self, node: Node) -> bool:
        return node.kind == SHAPE and any(name in self.caches.pasts for name in node.inputs)

    def own_past(self, name: str, block: int) -> str:
        """The past of this block that is as long as the past `name`."""
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
        """Each in the first block that needs it, from the last to the first node; not before what it looks at."""
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
        """The first block in which a node could be."""
        found: dict[int, int] = {}
        for node in self.graph.nodes:
            makers = [self.makers[name] for name in node.inputs if name in self.makers]
            first = max((found[maker.index] for maker in makers), default=0)
            found[node.index] = self.block.get(node.index, first)
        return found
