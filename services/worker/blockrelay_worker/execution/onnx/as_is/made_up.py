"""Made-up inputs: the same for a tensor of the same name and shape, whatever the machine."""

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

#: Token ids are below this where no table tells how many there are.
_FEW_TOKENS = 8
#: Floats are normal with this spread: what a norm or a softmax takes without an overflow in float16.
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
    """What to feed for the input.

    Integers and truth values of earlier blocks are lengths and places, so those that they gave (`given`) are fed: made
    up ones would point nowhere. A table of truth values that they did not give is taken for a mask, in which everybody
    may look at what came before. Raises OnnxBlocksError where they gave no integers, and for more than fits into
    memory.
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
    if name == "attention_mask":
        return np.ones(tuple(shape), np.int64)
    if name == "position_ids":
        return np.broadcast_to(np.arange(sizes.past, sizes.total), tuple(shape))
    return np.random.default_rng(1).integers(0, vocabulary or _FEW_TOKENS, tuple(shape))
