"""Weights beside a graph ("external data"): in the folder, and as long as the graph needs them."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from onnx import TensorProto

from blockrelay.onnx_blocks.weight_places import weight_place

#: Bytes of an element, of types that have whole ones.
ITEM_BYTES: Mapping[int, int] = {
    **dict.fromkeys((TensorProto.BOOL, TensorProto.INT8, TensorProto.UINT8), 1),
    **dict.fromkeys((TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT16, TensorProto.UINT16), 2),
    **dict.fromkeys((TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT32), 4),
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.INT64, TensorProto.UINT64), 8),
}


def check_weights(folder: Path, file: str, tensors: Iterable[TensorProto]) -> tuple[str, ...]:
    """The files beside `file` in which tensors of it lie. Raises OnnxBlocksError for one that is not in
    the folder, or ends before the tensor does."""
    names: set[str] = set()
    for tensor in tensors:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        owner = str(tensor.name)  # protobuf gives bytes where a file has no UTF-8
        said = {str(entry.key): str(entry.value) for entry in tensor.external_data}
        needed = ITEM_BYTES[tensor.data_type] * math.prod(tensor.dims) if tensor.data_type in ITEM_BYTES else 0
        names.add(weight_place(folder, said, needed=needed, file=file, owner=owner).name)
    return tuple(sorted(names - {file}))
