"""Traces a tensor back to the linear layers and norms that it comes from."""

from collections.abc import Mapping
from dataclasses import dataclass

from blockrelay.onnx_blocks.llama.graph import Graph, Node
from blockrelay.onnx_blocks.llama.operators import RESHAPING, LinearLayer, RmsNorm

_CUTTING = ("Split", "Slice")
#: Operators that return the lengths of a tensor, not its numbers: tracing ends there.
_LENGTHS = ("Shape", "Size")


@dataclass(frozen=True, slots=True)
class Trail:
    """The linear layer that a tensor comes from."""

    linear: LinearLayer
    is_first: bool | None = None
    """True if the tensor is the first part of the layer's output, False if a later part; None if it is all of it."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Traces tensors of a graph. Linear layers and norms are by the names of their outputs."""

    graph: Graph
    linears: Mapping[str, LinearLayer]
    norms: Mapping[str, RmsNorm]

    def same(self, tensor: str) -> str:
        """Returns the tensor with the numbers of `tensor` before operators that only change shape or type."""
        while (node := self._maker(tensor)) is not None and node.kind in RESHAPING:
            tensor = node.input(0)
        return tensor

    def trail(self, tensor: str) -> Trail | None:
        """Traces back to a linear layer, through operators that only reshape and cut.

        Returns None if another operator, or no linear layer, is there.
        """
        is_first: bool | None = None
        while (linear := self.linears.get(tensor)) is None:
            node = self._maker(tensor)
            if node is None or node.kind not in (*RESHAPING, *_CUTTING):
                return None
            if node.kind in _CUTTING:
                is_first = self._is_first_part(node, tensor)
            tensor = node.input(0)
        return Trail(linear, is_first)

    def behind(self, tensor: str) -> tuple[list[LinearLayer], list[RmsNorm]]:
        """Returns the nearest linear layers that a tensor is computed from, and the norms between them and it."""
        layers: dict[str, LinearLayer] = {}
        passed: dict[str, RmsNorm] = {}
        for name in self.graph.behind(tensor, ends=self._ends):
            if name in self.linears:
                layers[name] = self.linears[name]
            elif name in self.norms:
                passed[name] = self.norms[name]
        return list(layers.values()), list(passed.values())

    def _ends(self, tensor: str) -> bool:
        """Returns whether tracing ends at `tensor`: at the nearest linear layers, and where only lengths are taken."""
        maker = self._maker(tensor)
        return tensor in self.linears or (maker is not None and maker.kind in _LENGTHS)

    def _is_first_part(self, node: Node, tensor: str) -> bool:
        """Returns whether `tensor`, an output of the Split or Slice `node`, begins where the input does."""
        if node.kind == "Split":
            return node.outputs[0] == tensor
        start = self.graph.constants.get(node.input(1))
        return start is not None and start.values == (0.0,)

    def _maker(self, tensor: str) -> Node | None:
        return self.graph.makers.get(tensor)
