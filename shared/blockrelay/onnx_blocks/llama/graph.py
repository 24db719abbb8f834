"""Joins the graphs of all blocks into one, in which a tensor that several files have keeps one name."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.signature import Signature
from blockrelay.onnx_blocks.wiring import FromBlock, FromPast, FromRequest, Source, Wiring

#: The value of a node's attribute: a number, or several.
Attribute = float | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant tensor in a block's file: weights, or a few numbers."""

    file: str
    name: str
    """The name that it has in the file."""
    dtype: str
    """In numpy's spelling: float16."""
    shape: tuple[int, ...]
    values: tuple[float, ...] = ()
    """The numbers of a small constant; empty for a large one."""

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith("float")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def error(self, message: str) -> OnnxBlocksError:
        """Returns the error that names this constant and its file."""
        return OnnxBlocksError(message, file=self.file, tensor=self.name)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node of a graph: one operator, with the names of its inputs and outputs.

    The name of an optional input or output that is not there is empty.
    """

    file: str
    kind: str
    """The operator, such as MatMul."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]

    def number(self, name: str, default: float) -> float:
        """Returns the number that is the attribute `name`; `default` if it is missing or has several numbers."""
        value = self.attributes.get(name, default)
        return default if isinstance(value, tuple) else value

    def input(self, index: int) -> str:
        """Returns the name of the input at `index`, from 0; empty if the node does not have it."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def error(self, message: str, tensor: str = "") -> OnnxBlocksError:
        """Returns the error that names the node's file and a tensor as that file calls it.

        `tensor` is the tensor's name in the joined graph; without it the error names the node's first output.
        """
        return OnnxBlocksError(message, file=self.file, tensor=own_name(tensor or self.outputs[0]))


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """The graph of one block's file, with the names of that file."""

    signature: Signature
    nodes: Sequence[Node]
    constants: Mapping[str, Constant]
    """The constants by name."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in the graph of one block."""

    block: int
    """The block's number; the first is 1."""
    tensor: str
    """The name in the block's file."""


@dataclass(frozen=True, slots=True)
class Graph:
    """The graph of all blocks. Tensors have the names that `join` gives them."""

    nodes: Sequence[Node]
    """In the order in which they run."""
    constants: Mapping[str, Constant]
    """The constants by name."""
    makers: Mapping[str, Node]
    """The node that makes a tensor, by the tensor's name."""
    users: Mapping[str, Sequence[Node]]
    """The nodes that take a tensor, by the tensor's name."""
    presents: Mapping[tuple[int, str], str]
    """The name of the present, by the layer (from 0) and "key" or "value"."""
    cache_dims: tuple[int | str, ...]
    """The dimensions that the first past declares; empty if it declares none."""

    def behind(self, *tensors: str, ends: Callable[[str], bool] = lambda _: False) -> Iterator[str]:
        """Yields `tensors` and all that they are computed from, each once; `ends` tells behind which tracing ends."""
        stack, seen = list(tensors), set[str]()
        while stack:
            name = stack.pop()
            if name in seen or not name:
                continue
            seen.add(name)
            yield name
            maker = None if ends(name) else self.makers.get(name)
            stack += maker.inputs if maker is not None else ()

    def place(self, tensor: str) -> TensorPlace:
        """Returns the block, and the name in its file, of a tensor that a node makes."""
        block, _, name = tensor.partition(":")
        return TensorPlace(int(block), name)


def own_name(tensor: str) -> str:
    """Returns the name in its file of a tensor of a joined graph; `layer.half` for a past."""
    return tensor.partition(":")[2]


def join(blocks: Sequence[BlockGraph], wiring: Wiring) -> Graph:
    """Joins the graphs of `blocks`, which are all blocks of the wiring, in its order.

    A tensor of the result is called `block:name` after the block that makes it, or `request:name` or `past:layer.half`
    if no block does.
    """
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
    """Returns the name in the joined graph of a block's input `name`."""
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
