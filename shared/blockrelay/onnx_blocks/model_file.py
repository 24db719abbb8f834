"""An ONNX file as a message: read whole, weights beside it left alone. Needs `onnx`, which comes with the extras that
read such files.

Others made it, so nothing in it is trusted.
"""

from collections.abc import Mapping
from pathlib import Path

from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, TensorShapeProto, ValueInfoProto

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.signature import Dimension, Tensor

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
