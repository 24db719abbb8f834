"""All blocks as one graph: a tensor that one block hands to another has one name, whatever file it is read in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockrelay.onnx_blocks.signature import Signature
from blockrelay.onnx_blocks.wiring import FromBlock, FromPast, FromRequest, Source, Wiring

#: An attribute of a node: a number, or several.
Attribute = float | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that the file of a block brings: weights, or numbers. `dtype` as numpy spells it."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    values: tuple[float, ...] = ()
    """Of a small one, what it holds."""

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith("float")

    @property
    def size(self) -> int:
        size = 1
        for side in self.shape:
            size *= side
        return size


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An operator. Optional inputs and outputs that are not there are empty names."""

    file: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]

    def number(self, name: str, default: float) -> float:
        """An attribute that is one number."""
        value = self.attributes.get(name, default)
        return default if isinstance(value, tuple) else value

    def input(self, index: int) -> str:
        """Its name; empty where the node has no such input."""
        return self.inputs[index] if index < len(self.inputs) else ""


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """The graph of one file, by its own names."""

    signature: Signature
    nodes: Sequence[Node]
    constants: Mapping[str, Constant]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in the graph of block `block`, by the name that it has there."""

    block: int
    tensor: str


@dataclass(frozen=True, slots=True)
class Graph:
    """Of all blocks. Nodes are in the order in which they run."""

    nodes: Sequence[Node]
    constants: Mapping[str, Constant]
    makers: Mapping[str, Node]
    users: Mapping[str, Sequence[Node]]
    presents: Mapping[tuple[int, str], str]
    """The tensor that is the new `key` or `value` of a layer."""
    cache_dims: tuple[int | str, ...]
    """What the first past declares of itself; empty where it declares nothing."""

    def place(self, tensor: str) -> Place:
        """Where a tensor that a node makes is."""
        block, _, name = tensor.partition(":")
        return Place(int(block), name)


def own_name(tensor: str) -> str:
    """The name that people know, of a tensor of a joined graph."""
    return tensor.partition(":")[2]


def join(blocks: Sequence[BlockGraph], wiring: Wiring) -> Graph:
    """`blocks` in the order of the wiring. A tensor is called `block:name` after the block that makes it, and
    `request:name` or `past:layer.half` where none does."""
    nodes: list[Node] = []
    constants: dict[str, Constant] = {}
    for block, sources in zip(blocks, wiring.sources, strict=True):
        index = block.signature.index
        names = {name: _fed(name, source) for name, source in sources.items()}
        constants |= {f"{index}:{name}": constant for name, constant in block.constants.items()}

        def named(name: str, names: Mapping[str, str] = names, index: int = index) -> str:
            return names.get(name, f"{index}:{name}") if name else ""

        nodes += [
            Node(node.file, node.kind, tuple(map(named, node.inputs)), tuple(map(named, node.outputs)), node.attributes)
            for node in block.nodes
        ]
    users: dict[str, list[Node]] = {}
    for node in nodes:
        for name in dict.fromkeys(node.inputs):
            users.setdefault(name, []).append(node)
    return Graph(
        nodes=nodes,
        constants=constants,
        makers={name: node for node in nodes for name in node.outputs if name},
        users=users,
        presents={
            (slot.layer, slot.half): f"{present.index}:{present.name}" for slot, present in wiring.presents.items()
        },
        cache_dims=_cache_dims(wiring),
    )


def _fed(name: str, source: Source) -> str:
    match source:
        case FromRequest():
            return f"request:{name}"
        case FromBlock(index):
            return f"{index}:{name}"
        case FromPast(slot):
            return f"past:{slot.layer}.{slot.half}"


def _cache_dims(wiring: Wiring) -> tuple[int | str, ...]:
    for block, sources in zip(wiring.blocks, wiring.sources, strict=True):
        for tensor in block.inputs:
            if isinstance(sources[tensor.name], FromPast):
                return tensor.dims or ()
    return ()
