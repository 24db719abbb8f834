"""Reads an ONNX file as a protobuf message, with the weights in it or without them.

Needs the package `onnx`, which comes with the extras that read such files. Others made the file, so nothing in it is
trusted.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TensorShapeProto,
    ValueInfoProto,
    helper,
)

from blockrelay.block_folder.hub_cache import cached_repository
from blockrelay.block_folder.lfs_pointer import IS_POINTER, is_lfs_pointer
from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.signature import Dimension, Tensor, check_names
from blockrelay.onnx_blocks.weight_places import check_inside

#: Most bytes of an ONNX file, because protobuf has no larger messages.
_MAX_BYTES = 2 << 30
#: The dtypes, in numpy's names, that inputs and outputs of blocks may have, by their numbers in `TensorProto.DataType`.
DTYPES: Mapping[int, str] = {
    helper.np_dtype_to_tensor_dtype(np.dtype(name)): name
    for name in (
        *("float16", "float32", "float64", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}


#: Constants of fewer bytes stay in the graph: among them are shapes and axes, which ONNX Runtime reads.
_SMALL = 64 << 10
#: Numbers of fields in ONNX's protobuf messages, and of wire types.
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_RAW_DATA, _TENSOR_DATA_LOCATION = 7, 5, 9, 14
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def whole_model(path: Path, name: str) -> ModelProto:
    """Reads an ONNX file with the weights in it; weights beside it are not read.

    Raises OnnxBlocksError, which calls the file `name`, if it cannot be read, has 2 GiB or more, or has no graph.
    """
    return _parsed(path, name, Path.read_bytes)


def model_without_weights(path: Path, name: str) -> ModelProto:
    """Reads an ONNX file without the weights in it: large constants become external data.

    Their location is the name of this very file (the last part of `path`), at the offset where they are, so that they
    can be mapped from there. Raises OnnxBlocksError as `whole_model` does.
    """
    return _parsed(path, name, _graph_alone)


def _parsed(path: Path, name: str, read: Callable[[Path], bytes]) -> ModelProto:
    model = ModelProto()
    try:
        if path.stat().st_size >= _MAX_BYTES:
            raise OnnxBlocksError("larger than 2 GiB, as no ONNX file is", file=name)
        model.ParseFromString(read(path))
    except OSError as error:
        raise OnnxBlocksError(error.strerror or str(error), file=name) from None
    except DecodeError:
        if is_lfs_pointer(path):
            raise OnnxBlocksError(IS_POINTER, file=name) from None
        raise OnnxBlocksError("is not an ONNX file, or a part of one", file=name) from None
    if not model.ir_version or not model.graph.node or not model.graph.output:
        raise OnnxBlocksError("is not an ONNX file with a graph", file=name)
    return model


def _graph_alone(path: Path) -> bytes:
    """Returns the bytes of the message without large constants. Raises DecodeError if the file has no such message."""
    if not path.stat().st_size:
        return b""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return b"".join(
            _message(number, _graph(data, start, end, path.name)) if number == _MODEL_GRAPH else data[first:end]
            for number, first, start, end in _fields(data, 0, len(data))
        )


def _graph(data: mmap.mmap, start: int, end: int, name: str) -> bytes:
    return b"".join(
        _message(number, _tensor(data, value, stop, name)) if number == _GRAPH_INITIALIZER else data[first:stop]
        for number, first, value, stop in _fields(data, start, end)
    )


def _tensor(data: mmap.mmap, start: int, end: int, name: str) -> bytes:
    """Returns the bytes of a tensor's message, with its values, if they are large, replaced by their place in the file
    `name`."""
    fields = list(_fields(data, start, end))
    raw = [field for field in fields if field[0] == _TENSOR_RAW_DATA]
    if not raw or any(number == _TENSOR_DATA_LOCATION for number, *_ in fields):
        return data[start:end]
    _, _, value, stop = raw[-1]
    if stop - value < _SMALL:
        return data[start:end]
    place = TensorProto(data_location=TensorProto.EXTERNAL)
    for key, entry in (("location", name), ("offset", value), ("length", stop - value)):
        place.external_data.add(key=key, value=str(entry))
    rest = b"".join(data[first:last] for number, first, _, last in fields if number != _TENSOR_RAW_DATA)
    return rest + place.SerializeToString()


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields each field of the protobuf message `data[start:end]`: its number, and where the field starts, its value
    starts, and both end. Raises DecodeError.

    Format: https://protobuf.dev/programming-guides/encoding/
    """
    place = start
    while place < end:
        first = place
        tag, place = _number(data, place, end)
        wire, value = tag & 7, place
        if wire == _VARINT:
            _, place = _number(data, place, end)
        elif wire == _LENGTH:
            length, value = _number(data, place, end)
            place = value + length
        elif wire in (_FIXED64, _FIXED32):
            place += 8 if wire == _FIXED64 else 4
        else:
            raise DecodeError(f"a field of the kind {wire}")
        if place > end:
            raise DecodeError("a field that ends behind its message")
        yield tag >> 3, first, value, place


def _number(data: mmap.mmap, place: int, end: int) -> tuple[int, int]:
    """Decodes a varint at `place`. Returns it and where it ends. Raises DecodeError if it does not end before `end`."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= end:
            break
        byte, place = data[place], place + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise DecodeError("a number without an end")


def _message(number: int, content: bytes) -> bytes:
    """Encodes a field that is a message."""
    return _varint(number << 3 | _LENGTH) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def declared_tensors(file: str, kind: str, values: Sequence[ValueInfoProto]) -> tuple[Tensor, ...]:
    """Returns the inputs or outputs (`kind`) as the graph declares them. Raises OnnxBlocksError as `check_names` and
    `declared_tensor` do."""
    check_names(file, kind, [str(value.name) for value in values])
    return tuple(declared_tensor(file, value) for value in values)


def declared_tensor(file: str, value: ValueInfoProto) -> Tensor:
    """Returns an input or output as the graph declares it. Raises OnnxBlocksError, with `file` and the tensor's name,
    for one that is no tensor, or of a type or dimension that blocks cannot have."""
    name = str(value.name)  # protobuf gives bytes where a file has no UTF-8
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        what = kind.removesuffix("_type") if kind else "thing without a type"
        raise OnnxBlocksError(f"is a {what}, not a tensor", file=file, tensor=name)
    declared = value.type.tensor_type
    dtype = DTYPES.get(declared.elem_type)
    if dtype is None:
        named = dict(zip(TensorProto.DataType.values(), TensorProto.DataType.keys(), strict=True))
        spelt = named.get(declared.elem_type, "unknown").lower()
        raise OnnxBlocksError(f"is of the type {spelt}, of which blocks take nothing", file=file, tensor=name)
    if not declared.HasField("shape"):
        return Tensor(name, dtype, None)
    return Tensor(name, dtype, tuple(_dimension(file, name, one) for one in declared.shape.dim))


def _dimension(file: str, tensor: str, dim: TensorShapeProto.Dimension) -> Dimension:
    if dim.WhichOneof("value") == "dim_value":
        if dim.dim_value < 0:
            raise OnnxBlocksError(f"has a dimension of {dim.dim_value}", file=file, tensor=tensor)
        return dim.dim_value
    return "".join(letter for letter in str(dim.dim_param)[:100] if letter.isprintable())


def tensors_of(model: ModelProto) -> Iterator[TensorProto]:
    """Yields every constant tensor of a model, those of inner graphs and functions too: each may be external data."""

    def of_graph(graph: GraphProto) -> Iterator[TensorProto]:
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        yield from of_nodes(graph.node)

    def of_nodes(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                    yield from (sparse.values, sparse.indices)
            for inner in inner_graphs(node):
                yield from of_graph(inner)

    yield from of_graph(model.graph)
    for function in model.functions:
        yield from of_nodes(function.node)


def inner_graphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yields the graphs in a node, such as the branches of an If."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def constant_names(graph: GraphProto) -> set[str]:
    """Returns the names of the graph's initializers."""
    return {tensor.name for tensor in graph.initializer} | {one.values.name for one in graph.sparse_initializer}


def external_data(tensor: TensorProto) -> dict[str, str]:
    """Returns the entries that say where a tensor's elements are outside the graph: location, offset and length.

    Empty for a tensor whose elements are in the graph.
    """
    return {str(entry.key): str(entry.value) for entry in tensor.external_data}


def name_real_files(model: ModelProto, folder: Path) -> Path:
    """Returns the folder that ONNX Runtime must get as that of the weights of `model`, a model in `folder`.

    ONNX Runtime follows no link out of that folder. In a snapshot of Hugging Face's cache each file is such a link: the
    locations in `model` are then changed to the files that the links lead to, relative to the repository's folder,
    which is returned. Raises OnnxBlocksError for a location that is not in `folder`.
    """
    root, repository = folder.resolve(), cached_repository(folder)
    if repository is None:
        return root
    for tensor in tensors_of(model):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = (
                    check_inside(root, str(entry.value), file=root.name).resolve().relative_to(repository).as_posix()
                )
    return repository
