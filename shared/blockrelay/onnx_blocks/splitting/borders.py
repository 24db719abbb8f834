"""Where one block ends and the next begins: for every layer a minimum cut between its attention and that of the next
one, so that as few numbers as possible are handed on for each token.

Of equal cuts none is right by itself. The residual after attention is one tensor as well as the one after the MLP is,
so the one nearest to the next attention tells which products belong to this layer. Of the equal cuts behind the last
of these products the first is taken: norms and casts belong to what they are for. Numbers are counted, not their bytes:
else what is quantised for one product would be handed on in place of what it is made of.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.splitting.caches import Caches, Dependence
from blockrelay.onnx_blocks.splitting.graph import SHAPE, Graph, Node
from blockrelay.onnx_blocks.splitting.minimum_cut import Cut, minimum_cut

#: They add the residual as well, so a cut in front of them is wider than one behind; the final one belongs to the head.
_NORMS_THAT_ADD = ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")


@dataclass(frozen=True, slots=True)
class Borders:
    """`hidden_blocks`: for each node that tokens or a past go through, the block that it is in, by its index in the
    file. Blocks are counted from 0; the last is the head where the graph has one."""

    blocks: int
    hidden_blocks: Mapping[int, int]


def find_borders(graph: Graph, caches: Caches, depends: Dependence) -> Borders:
    """Raises OnnxBlocksError that names a tensor where layers do not follow each other."""
    search = _Search(graph, caches, depends)
    final = [tensor.name for tensor in graph.outputs if tensor.name not in caches.presents]
    presents: dict[int, list[str]] = {}
    for name, slot in caches.presents.items():
        presents.setdefault(slot.layer, []).append(name)
    border: frozenset[str] = frozenset()
    for layer in range(caches.layers - 1):
        after = {name for name, label in depends.layer.items() if label > layer}
        border = search.border(layer, border, after)
        search.place([*border, *presents[layer]], layer)
    last = caches.layers - 1
    head = search.head(last, border, final)
    if head:
        border = search.border(last, border, head)
        search.place([*border, *presents[last]], last)
    search.place([*presents[last], *final], caches.layers if head else last)
    return Borders(caches.layers + 1 if head else caches.layers, search.placed)


@dataclass(slots=True)
class _Search:
    graph: Graph
    caches: Caches
    depends: Dependence
    placed: dict[int, int] = field(default_factory=dict[int, int])
    _makers: Mapping[str, Node] = field(init=False)
    _widths: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._makers = self.graph.makers()
        self._widths = self.graph.all_widths()

    def border(self, layer: int, before: frozenset[str], after: Collection[str]) -> frozenset[str]:
        """The tensors that are handed on behind the layer. `before` are those behind the layer before it, `after` what
        lies beyond."""
        region = self._region(layer, before, after)
        latest = region.cut("sinks")
        cut = latest and region.cut("sources", also=self._products(latest.before))
        if cut is None:
            raise OnnxBlocksError(
                f"is the past of layer {layer}, and nothing lies between it and the next layer: they cannot be parted",
                file=self.graph.file,
                tensor=min(name for name, slot in self.caches.pasts.items() if slot.layer == layer),
            )
        return cut.vertices

    def head(self, layer: int, before: frozenset[str], final: Collection[str]) -> frozenset[str]:
        """What the head begins with, behind the last layer: products that lie beyond the narrowest place before the
        outputs that are no caches, and norms in front of them that add. Empty where there is no such product."""
        final = frozenset(filter(self._is_open, final))
        narrowest = self._region(layer, before, final).cut("sinks")
        if narrowest is None:
            return frozenset()
        beyond = self._back(final, stop=lambda node: not narrowest.before.isdisjoint(node.outputs))
        heads = self._products(name for node in beyond for name in node.outputs if name not in narrowest.before)
        inputs = [name for head in heads for name in self._makers[head].inputs]
        norms = self._back(inputs, stop=lambda node: node.is_product or node.kind in _NORMS_THAT_ADD)
        added = {name for node in norms if node.kind in _NORMS_THAT_ADD for name in node.outputs}
        return frozenset(heads | added)

    def place(self, wanted: Iterable[str], block: int) -> None:
        """Everything that they are made of and that has no block yet goes into this one."""
        todo, seen = list(wanted), set[int]()
        while todo:
            node = self._makers.get(todo.pop())
            if node is None or node.index in seen or node.index in self.placed:
                continue
            seen.add(node.index)
            if any(name in self.depends.hidden for name in node.outputs):
                self.placed[node.index] = block
                for name in node.inputs:
                    slot = self.caches.pasts.get(name)
                    if slot is not None and slot.layer != min(block, self.caches.layers - 1):
                        raise OnnxBlocksError(
                            f"is read by what makes {node.outputs[0]}, which is of layer {block}: layers do not follow "
                            "each other",
                            file=self.graph.file,
                            tensor=name,
                        )
            todo += node.inputs

    def _region(self, layer: int, before: frozenset[str], after: Collection[str]) -> "_Region":
        """What has no block yet, from `before` and the layer's past to what of `after` is made of it."""
        inside = {name for name in self.depends.hidden if self._is_open(name) and name not in after} | before
        edges = [
            (one, other)
            for node in self._open_nodes()
            for one in node.inputs
            if one in inside and node.kind != SHAPE
            for other in node.outputs
        ]
        sinks = {other for _, other in edges if other in after}
        return _Region(
            weights={name: self._widths[name] for name in inside | sinks},
            edges=edges,
            sources=before | (self._begins(layer) & inside),
            sinks=sinks,
        )

    def _begins(self, layer: int) -> set[str]:
        """What belongs to the layer in any case: what is made of the tokens, for the first one; what is made of its
        past; and its attention to the end, before which tensors are as long as the past."""
        found: set[str] = set()
        for node in self._open_nodes():
            hidden = [name for name in node.inputs if name in self.depends.hidden]
            slots = [self.caches.pasts.get(name) for name in hidden]
            of_past = any(slot is not None and slot.layer == layer for slot in slots)
            of_tokens = layer == 0 and any(
                slot is None and name not in self._makers for name, slot in zip(hidden, slots, strict=True)
            )
            is_attention = node.is_product and all(name in hidden for name in node.inputs[:2])
            of_layer = any(self.depends.layer.get(name) == layer for name in hidden)
            if node.kind != SHAPE and (of_past or of_tokens or (is_attention and of_layer)):
                found.update(node.outputs)
        return found

    def _products(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if name in self._makers and self._makers[name].is_product}

    def _is_open(self, name: str) -> bool:
        """Whether it is made by a node that has no block yet."""
        node = self._makers.get(name)
        return node is not None and node.index not in self.placed

    def _open_nodes(self) -> Iterable[Node]:
        return (node for node in self.graph.nodes if node.index not in self.placed)

    def _back(self, wanted: Iterable[str], stop: Callable[[Node], bool]) -> list[Node]:
        """The nodes that they are made by, and those before these, up to those that stop it."""
        todo, found, seen = list(wanted), list[Node](), set[int]()
        while todo:
            node = self._makers.get(todo.pop())
            if node is not None and node.index not in seen and any(one in self.depends.hidden for one in node.outputs):
                seen.add(node.index)
                found.append(node)
                todo += () if stop(node) else node.inputs
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """Where a border is looked for."""

    weights: Mapping[str, int]
    edges: Sequence[tuple[str, str]]
    sources: Collection[str]
    sinks: Collection[str]

    def cut(self, nearest_to: Literal["sources", "sinks"], *, also: Collection[str] = ()) -> Cut | None:
        """`also` belongs to the side of the sources. None where nothing lies between."""
        sources = {*self.sources, *also}
        return minimum_cut(self.weights, self.edges, sources=sources, sinks=self.sinks, nearest_to=nearest_to)
