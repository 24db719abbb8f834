"""Reads what the file of a block says of itself, without its weights: signature, files of weights, operators.

Others made it, so nothing in it is trusted: weights beside it lie in the same folder, whatever the file says.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TensorShapeProto,
    ValueInfoProto,
)

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.signature import Dimension, Signature, Tensor, check_names
from blockrelay.onnx_blocks.weight_places import check_inside
from blockrelay_worker.offline.onnx_blocks.weight_files import check_weights

#: Protobuf, in which the format is written, has no larger messages.
_MAX_BYTES = 2 << 30
#: Types of elements that inputs can be made of.
DTYPES: Mapping[int, str] = {
    TensorProto.FLOAT16: "float16",
    TensorProto.FLOAT: "float32",
    TensorProto.DOUBLE: "float64",
    TensorProto.BOOL: "bool",
    TensorProto.INT8: "int8",
    TensorProto.INT16: "int16",
    TensorProto.INT32: "int32",
    TensorProto.INT64: "int64",
    TensorProto.UINT8: "uint8",
    TensorProto.UINT16: "uint16",
    TensorProto.UINT32: "uint32",
    TensorProto.UINT64: "uint64",
}


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator that a graph uses, by the version of its set; `output` is of one of its nodes."""

    domain: str
    kind: str
    version: int
    output: str

    def __str__(self) -> str:
        return f"{self.domain}:{self.kind}" if self.domain else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFile:
    """One block, as read. `weights` are the files beside it that it names, by name, sorted."""

    path: Path
    signature: Signature
    weights: tuple[str, ...]
    operators: tuple[Operator, ...]
    ir_version: int
    vocabulary: int | None
    """Rows of the table that `input_ids` are looked up in; None where there is none in this block."""
    bytes: int
    sha256: str


def read_onnx_file(folder: Path, name: str, index: int) -> OnnxFile:
    """The file of block `index`. Raises OnnxBlocksError that names the file, and the tensor if it is one that is wrong.

    Holds the file in memory while it reads, weights that are inside included.
    """
    path = check_inside(folder, name, file=name)
    model, content = parsed_model(path, name)
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer} | {one.values.name for one in graph.sparse_initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    check_names(name, "inputs", [str(value.name) for value in inputs])
    check_names(name, "outputs", [str(value.name) for value in graph.output])
    signature = Signature(
        index,
        name,
        tuple(declared_tensor(name, value) for value in inputs),
        tuple(declared_tensor(name, one) for one in graph.output),
    )
    return OnnxFile(
        path=path,
        signature=signature,
        weights=check_weights(folder, name, tensors_of(model)),
        operators=tuple(_operators(model)),
        ir_version=model.ir_version,
        vocabulary=_vocabulary(graph),
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def parsed_model(path: Path, name: str) -> tuple[ModelProto, bytes]:
    """The file, which errors call `name`, with its content. Weights beside it are not read. Raises OnnxBlocksError."""
    try:
        if path.stat().st_size >= _MAX_BYTES:
            raise OnnxBlocksError("larger than 2 GiB, as no ONNX file is", file=name)
        content = path.read_bytes()
    except OSError as error:
        raise OnnxBlocksError(error.strerror or str(error), file=name) from None
    model = ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError:
        raise OnnxBlocksError("is not an ONNX file, or a part of one", file=name) from None
    if not model.ir_version or not model.graph.node or not model.graph.output:
        raise OnnxBlocksError("is not an ONNX file with a graph", file=name)
    return model, content


def declared_tensor(file: str, value: ValueInfoProto) -> Tensor:
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


def _vocabulary(graph: GraphProto) -> int | None:
    tables = {tensor.name: tensor.dims for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Gather" and list(node.input[1:]) == ["input_ids"] and node.input[0] in tables:
            return int(tables[node.input[0]][0]) if tables[node.input[0]] else None
    return None


def _nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """With those of graphs inside nodes."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if _has_graph(attribute) else ():
                yield from _nodes(inner.node)


def _has_graph(attribute: AttributeProto) -> bool:
    return attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def tensors_of(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of which a file may say that it lies elsewhere."""

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
                for inner in (attribute.g, *attribute.graphs) if _has_graph(attribute) else ():
                    yield from of_graph(inner)

    yield from of_graph(model.graph)
    for function in model.functions:
        yield from of_nodes(function.node)


def _operators(model: ModelProto) -> Iterator[Operator]:
    """Each once, but for those that the file itself defines."""
    own = {(function.domain, function.name) for function in model.functions}
    seen = set(own)
    parts: tuple[GraphProto | FunctionProto, ...] = (model.graph, *model.functions)
    for part in parts:
        imported = part.opset_import if isinstance(part, FunctionProto) else model.opset_import
        versions = {_domain(str(one.domain)): one.version for one in imported}
        for node in _nodes(part.node):
            key = (_domain(str(node.domain)), str(node.op_type))
            if key not in seen:
                seen.add(key)
                output = next((name for name in node.output if name), node.name)
                yield Operator(*key, versions.get(key[0], 1), str(output))


def _domain(name: str) -> str:
    """The standard's own set has two names."""
    return "" if name == "ai.onnx" else name
