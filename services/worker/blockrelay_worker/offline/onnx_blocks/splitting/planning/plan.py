"""Plans the blocks of a split model: the nodes of each, and the tensors that blocks send to each other.

Each block computes lengths of pasts from its own past, instead of getting them from an earlier block: all pasts are
equally long.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.served_shape import LOGITS
from blockrelay_worker.offline.onnx_blocks.splitting.planning.borders import find_borders
from blockrelay_worker.offline.onnx_blocks.splitting.planning.caches import (
    Caches,
    dependence,
    find_pasts,
    find_presents,
)
from blockrelay_worker.offline.onnx_blocks.splitting.planning.graph import GraphNode, WholeGraph
from blockrelay_worker.offline.onnx_blocks.splitting.planning.places import Places

#: Name of the input with token ids, which a model to be split must have.
TOKENS = "input_ids"
#: [batch, positions, vocabulary].
_LOGITS_RANK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One block of the split model. Names are those of the whole model."""

    nodes: tuple[int, ...]
    """Indexes in the file of the whole model, in running order."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: frozenset[str]
    """Names of the initializers that its nodes read."""
    lengths_from: Mapping[str, str]
    """The block's own past by each past of another layer whose dimensions a node of this block reads."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The plan of a whole split."""

    blocks: tuple[BlockPlan, ...]
    """All blocks, in order."""
    renamed: Mapping[str, str]
    """New names of caches and logits by which blocks can be wired, by the names in the whole model."""


def plan_split(graph: WholeGraph) -> SplitPlan:
    """Returns the plan for `graph`.

    Raises OnnxBlocksError if the graph is not a decoder of layers with an input TOKENS. The error names the tensor, if
    one is wrong.
    """
    pasts = find_pasts(graph)
    if TOKENS not in {tensor.name for tensor in graph.inputs}:
        raise OnnxBlocksError(f"has no input {TOKENS}", file=graph.file)
    depends = dependence(graph, pasts, TOKENS)
    caches = Caches(pasts, find_presents(graph, pasts, depends))
    borders = find_borders(graph, caches, depends)
    places = Places(graph, caches, depends, borders)
    return SplitPlan(tuple(_assembled(places)), {**caches.renamed(), **_called_logits(graph, caches)})


def _called_logits(graph: WholeGraph, caches: Caches) -> Mapping[str, str]:
    """Returns the new name `logits` for the only output that is not a cache, if it has another name.

    torch names an output like the node that computes it.
    """
    others = [tensor for tensor in graph.outputs if tensor.name not in caches.presents]
    taken = LOGITS in graph.constants or LOGITS in graph.makers() or any(one.name == LOGITS for one in graph.inputs)
    return {} if taken or len(others) != 1 or others[0].rank != _LOGITS_RANK else {others[0].name: LOGITS}


def _assembled(places: Places) -> Iterable[BlockPlan]:
    count = places.borders.blocks
    drafts = [_Draft(places, block) for block in range(count)]
    handed_on = {name for draft in drafts for name in draft.takes}
    final = [tensor.name for tensor in places.graph.outputs]
    for name in final:
        if name not in places.makers or places.makers[name].index not in places.block:
            raise OnnxBlocksError("is an output that no input changes", file=places.graph.file, tensor=name)
    for draft in drafts:
        made = [name for node in draft.placed for name in node.outputs]
        border = [name for name in made if name in handed_on and name not in final]
        outputs = [*border, *(name for name in final if name in made)]
        yield BlockPlan(
            nodes=tuple(node.index for node in places.graph.nodes if node.index in draft.nodes),
            inputs=tuple(draft.inputs()),
            outputs=tuple(outputs),
            constants=frozenset(draft.constants),
            lengths_from=draft.lengths_from,
        )


class _Draft:
    """The plan of one block while its nodes are read: `nodes` include copies, `takes` are tensors of other blocks."""

    def __init__(self, places: Places, block: int) -> None:
        self._places, self._block = places, block
        self.placed = [node for node in places.graph.nodes if places.block.get(node.index) == block]
        self.nodes = {node.index for node in self.placed}
        self.takes: dict[str, None] = {}
        self.constants: set[str] = set()
        self.lengths_from: dict[str, str] = {}
        self._of_request: set[str] = set()
        self._pasts: set[str] = set()
        for node in self.placed:
            self._read(node)

    def inputs(self) -> Sequence[str]:
        """Returns the names of the inputs: those of the request first, then those of other blocks, then pasts."""
        of_graph = [tensor.name for tensor in self._places.graph.inputs]
        request = [name for name in of_graph if name in self._of_request]
        return [*request, *self.takes, *(name for name in of_graph if name in self._pasts)]

    def _read(self, node: GraphNode) -> None:
        for name in node.inputs:
            maker = self._places.makers.get(name)
            if name in self._places.graph.constants:
                self.constants.add(name)
            elif name in self._places.caches.pasts:
                self._read_past(node, name)
            elif maker is None:
                self._of_request.add(name)
            elif self._has_copy(maker):
                if maker.index not in self.nodes:
                    self.nodes.add(maker.index)
                    self._read(maker)
            elif maker.index not in self.nodes:
                if self._places.block[maker.index] > self._block:
                    raise OnnxBlocksError(
                        f"is needed in block_{self._block + 1} and made of later layers",
                        file=self._places.graph.file,
                        tensor=name,
                    )
                self.takes[name] = None

    def _has_copy(self, maker: GraphNode) -> bool:
        """Returns whether this block computes `maker` itself instead of getting its outputs from another block."""
        if self._places.is_fixed(maker):
            return True
        return maker.index in self._places.of_lengths and self._block < self._places.caches.layers

    def _read_past(self, node: GraphNode, name: str) -> None:
        if self._places.is_length_of_past(node):
            own = self._places.own_past(name, self._block)
            if own != name:
                self.lengths_from[name] = own
            name = own
        elif self._places.caches.pasts[name].layer != self._block:
            raise OnnxBlocksError(
                f"is read by what makes {node.outputs[0]} in block_{self._block + 1}: layers do not follow each other",
                file=self._places.graph.file,
                tensor=name,
            )
        self._pasts.add(name)
