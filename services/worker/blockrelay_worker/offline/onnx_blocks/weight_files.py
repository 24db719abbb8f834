"""Checks weight files beside a graph ("external data"): they are in its folder, and long enough."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from onnx import TensorProto

from blockrelay.onnx_blocks.model_file import DTYPES, external_data
from blockrelay.onnx_blocks.weight_places import weight_place

#: Bytes per element by ONNX data type (`TensorProto.DataType`), for types of whole bytes.
ITEM_BYTES: Mapping[int, int] = {
    **{kind: np.dtype(name).itemsize for kind, name in DTYPES.items()},
    TensorProto.BFLOAT16: 2,
}


def check_weights(folder: Path, file: str, tensors: Iterable[TensorProto]) -> tuple[str, ...]:
    """The names of the files in `folder` that have tensors of the graph `file`, sorted, without `file` itself.

    Tensors that the graph itself stores are skipped. The length of a tensor whose type is not in ITEM_BYTES is checked
    only if the graph states it. Raises OnnxBlocksError for a file that is outside the folder, is missing, is a Git LFS
    pointer or ends before its tensor does, and for an offset or length that is wrong.
    """
    names: set[str] = set()
    for tensor in tensors:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        owner = str(tensor.name)  # protobuf gives bytes where a file has no UTF-8
        needed = ITEM_BYTES[tensor.data_type] * math.prod(tensor.dims) if tensor.data_type in ITEM_BYTES else 0
        names.add(weight_place(folder, external_data(tensor), needed=needed, file=file, owner=owner).name)
    return tuple(sorted(names - {file}))
