"""Made-up inputs of blocks: the same on every machine for a tensor of the same name and shape."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.dimensions import StepSizes
from blockrelay.onnx_blocks.signature import Tensor, shown
from blockrelay.onnx_blocks.wiring import FromRequest, Source

#: Token ids stay below this where the size of the vocabulary is unknown.
_FEW_TOKENS = 8
#: Standard deviation of made-up floats: no norm or softmax overflows float16 with it.
_SPREAD = 0.5
_MAX_BYTES = 16 << 30

Array = NDArray[Any]


def made_up(
    file: str,
    tensor: Tensor,
    source: Source,
    shape: Sequence[int],
    sizes: StepSizes,
    *,
    vocabulary: int | None,
    given: Mapping[str, Array],
) -> Array:
    """Returns content for the input `tensor` of the block in `file`, an array of `shape` and the tensor's dtype.

    `source` says where a served block gets the input from: the request, an earlier block or the KV. `sizes` are those
    of the step; `vocabulary` bounds token ids (None: unknown).
    Integers and booleans of earlier blocks are lengths and positions, so their real values (`given`) are returned, in
    their own shape: made-up ones would point nowhere. A boolean array of two or more dimensions that is not in `given`
    becomes a causal mask.
    Raises OnnxBlocksError for other integers and booleans that are not in `given`, unless the array is empty, and for
    an array of more than 16 GiB.
    """
    dtype = np.dtype(tensor.dtype)
    if math.prod(shape) * dtype.itemsize > _MAX_BYTES:
        raise OnnxBlocksError(f"would take more than 16 GiB as {shown(shape)}", file=file, tensor=tensor.name)
    if isinstance(source, FromRequest):
        return _requested(tensor.name, shape, sizes, vocabulary).astype(dtype)
    random = np.random.default_rng(zlib.crc32(tensor.name.encode()))
    if dtype.kind == "f":
        return (random.standard_normal(tuple(shape), np.float32) * _SPREAD).astype(dtype)
    if tensor.name in given:
        return given[tensor.name]
    if math.prod(shape) == 0:
        return np.zeros(tuple(shape), dtype)
    if dtype.kind == "b" and len(shape) > 1:
        rows, columns = shape[-2:]
        return np.broadcast_to(np.tri(rows, columns, columns - rows, dtype=bool), tuple(shape)).copy()
    raise OnnxBlocksError(
        f"is {dtype}, which cannot be made up, and no earlier block gave it", file=file, tensor=tensor.name
    )


def _requested(name: str, shape: Sequence[int], sizes: StepSizes, vocabulary: int | None) -> Array:
    """Returns content for an input of the request: mask, positions or token ids."""
    if name == "attention_mask":
        return np.ones(tuple(shape), np.int64)
    if name == "position_ids":
        return np.broadcast_to(np.arange(sizes.past, sizes.total), tuple(shape))
    return np.random.default_rng(1).integers(0, vocabulary or _FEW_TOKENS, tuple(shape))
