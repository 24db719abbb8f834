"""Tensors that travel between stages of ONNX blocks: joined for the groups of a stage, and cut apart after it. Pure.

Each stage chooses which sequences run together, so tensors travel for one sequence each.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay.onnx_blocks.handed_on import HandedOn
from blockrelay.onnx_blocks.signature import shown
from blockrelay_worker.execution.onnx.as_is.groups import SegmentPart

Arrays = dict[str, NDArray[Any]]


def joined(parts: Sequence[SegmentPart], tensors: Sequence[HandedOn], block: str) -> Arrays:
    """Returns the tensors that a stage gets for a group: the sequences side by side, or the first one's tensor if it
    does not depend on the sequences. `block` is the stage's first block.

    Raises ExecutionError, with block and tensor, if a tensor is missing or not as its maker declares it, or if its
    shape differs between the sequences.
    """
    result: Arrays = {}
    for one in tensors:
        arrays = [_given(part.given, one, block) for part in parts]
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1:
            all_of_them = ", ".join(map(shown, sorted(shapes)))
            raise _wrong(block, one, f"came as {all_of_them} of sequences of one length")
        together = one.batch_axis is not None and len(arrays) > 1
        result[one.name] = np.concatenate(arrays, axis=one.batch_axis) if together else arrays[0]
    return result


def cut(arrays: Mapping[str, NDArray[Any]], tensors: Sequence[HandedOn], count: int) -> list[Arrays]:
    """Returns each of `count` sequences' share of a group's outputs. If a graph declares one for each sequence and
    gives one for all, each sequence gets it. Raises ExecutionError, with block and tensor, for any other shape."""
    shares: list[Arrays] = [{} for _ in range(count)]
    for one in tensors:
        array, axis = arrays[one.name], one.batch_axis
        if array.ndim != one.tensor.rank:
            raise _wrong(
                one.maker.block, one, f"is {shown(array.shape)}, and its file declares {one.tensor.rank} dimensions"
            )
        length = 1 if axis is None else array.shape[axis]
        if length not in (1, count):
            raise _wrong(one.maker.block, one, f"is {shown(array.shape)} of {count} sequences, side {axis}")
        for number, own in enumerate(shares):
            own[one.name] = array if axis is None or length == 1 else np.take(array, [number], axis=axis)
    return shares


def _given(given: Mapping[str, NDArray[Any]], one: HandedOn, block: str) -> NDArray[Any]:
    """Returns the tensor of one sequence, checked."""
    array = given.get(one.name)
    if array is None:
        raise _wrong(block, one, "has not come from the stage before")
    rank, dtype = one.tensor.rank, np.dtype(one.tensor.dtype)
    if array.dtype != dtype or array.ndim != rank:
        raise _wrong(block, one, f"came as {array.dtype} {shown(array.shape)}, and is {dtype} of {rank} dimensions")
    if one.batch_axis is not None and array.shape[one.batch_axis] != 1:
        raise _wrong(block, one, f"came as {shown(array.shape)}: side {one.batch_axis} of one sequence is 1")
    return array


def _wrong(block: str, one: HandedOn, message: str) -> ExecutionError:
    return ExecutionError(f"{block}: {one.name}: {message}", block=block)
