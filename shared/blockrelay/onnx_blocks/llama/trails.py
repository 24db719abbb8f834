"""From a tensor back to the product that it comes from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blockrelay.onnx_blocks.llama.graph import Graph, Node
from blockrelay.onnx_blocks.llama.operators import RESHAPING, Norm, Product

_CUTTING = ("Split", "Slice")
#: What is behind it tells how long tensors are, not what is in them.
_LENGTHS = ("Shape", "Size")


@dataclass(frozen=True, slots=True)
class Trail:
    """`is_first`: through a cut, of which this is the first part; None: through none."""

    product: Product
    is_first: bool | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """All products and norms of a graph, by what they make."""

    graph: Graph
    products: Mapping[str, Product]
    norms: Mapping[str, Norm]

    def same(self, tensor: str) -> str:
        """The tensor whose numbers these are, in another shape or type perhaps."""
        while (node := self._maker(tensor)) is not None and node.kind in RESHAPING:
            tensor = node.input(0)
        return tensor

    def trail(self, tensor: str) -> Trail | None:
        """Back to a product, through what only reshapes and cuts; None where something else is in between."""
        is_first: bool | None = None
        while (product := self.products.get(tensor)) is None:
            node = self._maker(tensor)
            if node is None or node.kind not in (*RESHAPING, *_CUTTING):
                return None
            if node.kind in _CUTTING:
                is_first = self._is_first_part(node, tensor)
            tensor = node.input(0)
        return Trail(product, is_first)

    def behind(self, tensor: str) -> tuple[list[Product], list[Norm]]:
        """The nearest products that a tensor is made of, and the norms between them and it."""
        found: dict[str, Product] = {}
        passed: dict[str, Norm] = {}
        for name in self._back(tensor):
            if name in self.products:
                found[name] = self.products[name]
            elif name in self.norms:
                passed[name] = self.norms[name]
        return list(found.values()), list(passed.values())

    def _back(self, tensor: str) -> Iterable[str]:
        """Tensors that it is made of, not beyond products."""
        left, seen = [tensor], {tensor}
        while left:
            name = left.pop()
            yield name
            node = self._maker(name)
            if node is None or name in self.products or node.kind in _LENGTHS:
                continue
            left += [each for each in node.inputs if each and each not in seen]
            seen.update(node.inputs)

    def _is_first_part(self, node: Node, tensor: str) -> bool:
        if node.kind == "Split":
            return node.outputs[0] == tensor
        start = self.graph.constants.get(node.input(1))
        return start is not None and start.values == (0.0,)

    def _maker(self, tensor: str) -> Node | None:
        return self.graph.makers.get(tensor)
