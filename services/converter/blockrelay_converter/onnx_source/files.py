"""Reads the files of a folder of ONNX blocks: their graphs as data, and the place of the numbers of each constant.

Weights are memory-mapped and never loaded whole, whether they lie in a file of their own or in the graph's.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.blocks_file import block_names
from blockrelay.onnx_blocks.llama.graph import Attribute, BlockGraph, Constant, Graph, Node, join
from blockrelay.onnx_blocks.model_file import declared_tensors, model_without_weights
from blockrelay.onnx_blocks.signature import Signature
from blockrelay.onnx_blocks.weight_places import WeightPlace, check_inside, weight_place
from blockrelay.onnx_blocks.wiring import Wiring, wire

#: Constants of at most this many numbers are read with the graph: epsilons, indexes, shapes.
_FEW = 16
Array = NDArray[Any]
"""The numbers of a constant, in its own dtype and shape."""


@dataclass(slots=True)
class OnnxBlocks:
    """A folder of ONNX blocks after its graphs were read and wired. Not for use by several threads."""

    root: Path
    wiring: Wiring
    """The source of each input of each block."""
    graph: Graph
    """The graphs of all blocks, joined into one."""
    files: tuple[str, ...]
    """Names of all files: the blocks in order, then the weight files."""
    _beside: Mapping[tuple[str, str], WeightPlace]
    """The place of each constant that lies in a weight file, by (graph file, constant name)."""
    _opened: str = ""
    """Name of the graph file whose constants `_inside` and `_arrays` hold."""
    _inside: dict[str, TensorProto] = field(default_factory=dict[str, TensorProto])
    _arrays: dict[str, Array] = field(default_factory=dict[str, Array])
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict[Path, mmap.mmap])

    def array(self, constant: Constant) -> Array:
        """Returns the numbers of a constant of `graph`, not to be changed.

        Raises OnnxBlocksError that names a constant whose data differs from its declaration.
        """
        beside = self._beside.get((constant.file, constant.name))
        if beside is not None:
            return self._mapped(constant, beside)
        if self._opened != constant.file:
            self._arrays.clear()
            self._inside = _inside(_parsed(self.root, constant.file))
            self._opened = constant.file
        if constant.name not in self._arrays:
            self._arrays[constant.name] = _numbers(self._inside[constant.name], constant.file)
        return self._arrays[constant.name]

    def forget(self) -> None:
        """Releases memory; all constants may be read again."""
        self._opened = ""
        self._inside, self._arrays = {}, {}
        for mapped in self._maps.values():
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def _mapped(self, constant: Constant, beside: WeightPlace) -> Array:
        if beside.path not in self._maps:
            with beside.path.open("rb") as file:
                self._maps[beside.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        kind = np.dtype(constant.dtype).newbyteorder("<")
        flat = np.frombuffer(self._maps[beside.path], kind, constant.size, beside.offset)
        return flat.reshape(constant.shape)


def read_onnx_blocks(root: Path) -> OnnxBlocks:
    """Reads and wires all blocks of the folder `root`.

    Raises OnnxBlocksError that names the file, and the tensor where the error is in one.
    """
    names = block_names(root)
    blocks: list[BlockGraph] = []
    beside: dict[tuple[str, str], WeightPlace] = {}
    for index, name in enumerate(names, 1):
        blocks.append(_block(root, name, index, beside))
    wiring = wire([block.signature for block in blocks])
    weights = sorted({str(place.path.relative_to(root)) for place in beside.values()} - set(names))
    return OnnxBlocks(root, wiring, join(blocks, wiring), (*names, *weights), beside)


def _parsed(root: Path, name: str) -> ModelProto:
    model = model_without_weights(check_inside(root, name, file=name), name)
    if model.functions:
        raise OnnxBlocksError("has operators that the file itself defines; export it without them", file=name)
    return model


def _block(root: Path, name: str, index: int, beside: dict[tuple[str, str], WeightPlace]) -> BlockGraph:
    """Reads the graph of block `index` and adds the places of its weights in other files to `beside`."""
    model = _parsed(root, name)
    tensors = _inside(model)
    inputs = declared_tensors(name, "inputs", [value for value in model.graph.input if value.name not in tensors])
    signature = Signature(index, name, inputs, declared_tensors(name, "outputs", model.graph.output))
    constants = {owner: _constant(root, name, owner, tensor, beside) for owner, tensor in tensors.items()}
    nodes = [_node(name, node) for node in model.graph.node if node.op_type != "Constant"]
    return BlockGraph(signature, nodes, constants)


def _inside(model: ModelProto) -> dict[str, TensorProto]:
    """Returns all constants of a graph by name: its initializers, and the outputs of its Constant nodes."""
    constants = {str(tensor.name): tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if (tensor := _constant_value(attribute)) is not None:
                    constants[str(node.output[0])] = tensor
    return constants


def _constant_value(attribute: AttributeProto) -> TensorProto | None:
    """Returns the value of a Constant node from one of its attributes, or None if the attribute holds none."""
    value: Any = helper.get_attribute_value(attribute)
    match attribute.name:
        case "value":
            return value
        case "value_int" | "value_ints":
            return numpy_helper.from_array(np.asarray(value, np.int64))
        case "value_float" | "value_floats":
            return numpy_helper.from_array(np.asarray(value, np.float32))
        case _:
            return None


def _constant(
    root: Path, file: str, name: str, tensor: TensorProto, beside: dict[tuple[str, str], WeightPlace]
) -> Constant:
    dims = tuple(int(dim) for dim in tensor.dims)
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    except KeyError:
        raise OnnxBlocksError(f"has elements of the unknown type {tensor.data_type}", file=file, tensor=name) from None
    if any(dim < 0 for dim in dims):
        raise OnnxBlocksError(f"has the dimensions {list(dims)}", file=file, tensor=name)
    size = math.prod(dims)
    values: tuple[float, ...] = ()
    if tensor.data_location == TensorProto.EXTERNAL:
        external = {str(entry.key): str(entry.value) for entry in tensor.external_data}
        beside[file, name] = weight_place(root, external, needed=size * dtype.itemsize, file=file, owner=name)
    elif 0 < size <= _FEW and dtype.kind in "fiub":
        values = tuple(float(value) for value in _numbers(tensor, file, name).reshape(-1))
    return Constant(file, name, str(dtype), dims, values)


def _numbers(tensor: TensorProto, file: str, name: str = "") -> Array:
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError):
        raise OnnxBlocksError(
            "does not hold as many numbers as it declares: altered or cut off", file=file, tensor=name or tensor.name
        ) from None


def _node(file: str, node: NodeProto) -> Node:
    attributes: dict[str, Attribute] = {}
    for attribute in node.attribute:
        if attribute.type == AttributeProto.INT:
            attributes[attribute.name] = attribute.i
        elif attribute.type == AttributeProto.FLOAT:
            attributes[attribute.name] = attribute.f
        elif attribute.type == AttributeProto.INTS:
            attributes[attribute.name] = tuple(attribute.ints)
    return Node(file, str(node.op_type), tuple(node.input), tuple(node.output), attributes)
