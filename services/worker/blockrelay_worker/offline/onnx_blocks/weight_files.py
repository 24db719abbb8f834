"""Checks weight files beside a graph ("external data"): they are in its folder, and long enough."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from onnx import TensorProto

from blockrelay.onnx_blocks.weight_places import weight_place

#: Bytes per element, for types of whole bytes.
ITEM_BYTES: Mapping[int, int] = {
    **dict.fromkeys((TensorProto.BOOL, TensorProto.INT8, TensorProto.UINT8), 1),
    **dict.fromkeys((TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT16, TensorProto.UINT16), 2),
    **dict.fromkeys((TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT32), 4),
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.INT64, TensorProto.UINT64), 8),
}


def check_weights(folder: Path, file: str, tensors: Iterable[TensorProto]) -> tuple[str, ...]:
    """The names of the files in `folder` that have tensors of `file`, sorted.

    Raises OnnxBlocksError for a file outside the folder, and for one that ends before its tensor does.
    """
    names: set[str] = set()
    for tensor in tensors:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        owner = str(tensor.name)  # protobuf gives bytes where a file has no UTF-8
        entries = {str(entry.key): str(entry.value) for entry in tensor.external_data}
        needed = ITEM_BYTES[tensor.data_type] * math.prod(tensor.dims) if tensor.data_type in ITEM_BYTES else 0
        names.add(weight_place(folder, entries, needed=needed, file=file, owner=owner).name)
    return tuple(sorted(names - {file}))
