"""Finds the borders between blocks: a minimum cut between the attention of each layer and that of the next one.

The cut's weight is the count of numbers per token that one block sends to the next. Often several cuts are equally
light: the residual after attention is one tensor, and so is the residual after the MLP. Therefore two cuts are made.
The lightest cut nearest to the next attention shows which matmuls belong to this layer. Then the first of the lightest
cuts behind the last of these matmuls is the border, so norms and casts are in the block that uses their result. The
weight counts numbers, not bytes: otherwise a block would send a tensor that is quantised for one matmul instead of the
tensor that it is computed from.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from blockrelay.errors import OnnxBlocksError
from blockrelay_worker.offline.onnx_blocks.splitting.planning.caches import Caches, Dependence
from blockrelay_worker.offline.onnx_blocks.splitting.planning.graph import SHAPE, GraphNode, WholeGraph
from blockrelay_worker.offline.onnx_blocks.splitting.planning.minimum_cut import Cut, minimum_cut

#: Norms that also add the residual, so a cut before one is wider than a cut behind it; the final norm is in the head.
_NORMS_THAT_ADD = ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
#: Returns the minimum cut that is nearest to the sources or the sinks (first argument); None if no cut separates them.
#: The second argument has more tensors that count as sources.
_CutOf = Callable[[Literal["sources", "sinks"], Collection[str]], Cut | None]


@dataclass(frozen=True, slots=True)
class Borders:
    """The block of each node that depends on tokens or on a past and that an output needs. Blocks count from 0."""

    blocks: int
    """The number of blocks: one per layer, and the head if the graph has one."""
    hidden_blocks: Mapping[int, int]
    """The block of each such node, by the index of the node in the file. Nodes that no output needs are absent."""


def find_borders(graph: WholeGraph, caches: Caches, depends: Dependence) -> Borders:
    """Returns the borders of all layers.

    Raises OnnxBlocksError, with a tensor, if layers do not follow each other or nothing lies between two of them.
    """
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
    """The search for borders, from the first layer to the last; `placed` grows with each `place`."""

    graph: WholeGraph
    caches: Caches
    depends: Dependence
    placed: dict[int, int] = field(default_factory=dict[int, int])
    """The block of each node that has one so far, by the index of the node in the file."""
    _makers: Mapping[str, GraphNode] = field(init=False)
    _widths: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._makers = self.graph.makers()
        self._widths = self.graph.all_widths()

    def border(self, layer: int, before: frozenset[str], after: Collection[str]) -> frozenset[str]:
        """Returns the tensors that the layer's block sends to later blocks.

        `before` is the border of the previous layer; `after` holds tensors that are certainly in later blocks. Raises
        OnnxBlocksError if no cut separates the layer from the next one.
        """
        cut_of = self._region(layer, before, after)
        latest = cut_of("sinks", ())
        cut = latest and cut_of("sources", self._products(latest.before))
        if cut is None:
            raise OnnxBlocksError(
                f"is the past of layer {layer}, and nothing lies between it and the next layer: they cannot be parted",
                file=self.graph.file,
                tensor=min(name for name, slot in self.caches.pasts.items() if slot.layer == layer),
            )
        return cut.vertices

    def head(self, layer: int, before: frozenset[str], final: Collection[str]) -> frozenset[str]:
        """Returns the first tensors of the head: results of matmuls behind the narrowest cut, and of norms before them.

        `final` are the outputs that are not caches; the cut nearest to them is meant. Only norms that also add the
        residual count. Empty if there is no such matmul or no cut: then the model has no head.
        """
        final = frozenset(filter(self._is_open, final))
        narrowest = self._region(layer, before, final)("sinks", ())
        if narrowest is None:
            return frozenset()
        beyond = self._back(final, stop=lambda node: not narrowest.before.isdisjoint(node.outputs))
        heads = self._products(name for node in beyond for name in node.outputs if name not in narrowest.before)
        inputs = [name for head in heads for name in self._makers[head].inputs]
        norms = self._back(inputs, stop=lambda node: node.is_product or node.kind in _NORMS_THAT_ADD)
        added = {name for node in norms if node.kind in _NORMS_THAT_ADD for name in node.outputs}
        return frozenset(heads | added)

    def place(self, wanted: Iterable[str], block: int) -> None:
        """Puts into `block` every node that `wanted` tensors depend on and that has no block yet.

        Raises OnnxBlocksError if one of these nodes reads the past of another layer.
        """
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

    def _region(self, layer: int, before: frozenset[str], after: Collection[str]) -> _CutOf:
        """Returns a function for cuts of the nodes without a block, from `before` and the layer's past to tensors of
        `after`. Tensors are vertices, weighted by numbers per token."""
        inside = {name for name in self.depends.hidden if self._is_open(name) and name not in after} | before
        edges = [
            (one, other)
            for node in self._open_nodes()
            for one in node.inputs
            if one in inside and node.kind != SHAPE
            for other in node.outputs
        ]
        sinks = {other for _, other in edges if other in after}
        weights = {name: self._widths[name] for name in inside | sinks}
        sources = before | (self._begins(layer) & inside)

        def cut_of(nearest_to: Literal["sources", "sinks"], also: Collection[str]) -> Cut | None:
            return minimum_cut(weights, edges, sources={*sources, *also}, sinks=sinks, nearest_to=nearest_to)

        return cut_of

    def _begins(self, layer: int) -> set[str]:
        """Returns the outputs of nodes that certainly belong to the layer.

        These nodes read its past, or (layer 0) the tokens, or are the matmuls of its attention: inside the attention
        tensors are as long as the past, so no border may be there.
        """
        names: set[str] = set()
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
                names.update(node.outputs)
        return names

    def _products(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if name in self._makers and self._makers[name].is_product}

    def _is_open(self, name: str) -> bool:
        """Returns whether the tensor `name` is computed by a node that has no block yet."""
        node = self._makers.get(name)
        return node is not None and node.index not in self.placed

    def _open_nodes(self) -> Iterable[GraphNode]:
        return (node for node in self.graph.nodes if node.index not in self.placed)

    def _back(self, wanted: Iterable[str], stop: Callable[[GraphNode], bool]) -> list[GraphNode]:
        """Returns the nodes that `wanted` tensors depend on, back to and including those for which `stop` is true."""
        todo, nodes, seen = list(wanted), list[GraphNode](), set[int]()
        while todo:
            node = self._makers.get(todo.pop())
            if node is not None and node.index not in seen and any(one in self.depends.hidden for one in node.outputs):
                seen.add(node.index)
                nodes.append(node)
                todo += () if stop(node) else node.inputs
        return nodes
