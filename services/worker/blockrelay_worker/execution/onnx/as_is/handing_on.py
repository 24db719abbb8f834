"""Tensors that travel between stages of ONNX blocks, put together for the groups of a stage and cut apart behind it.
Pure.

Which sequences run together is each stage's own affair, so what travels is that of one sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay.onnx_blocks.handed_on import HandedOn
from blockrelay.onnx_blocks.signature import shown
from blockrelay_worker.execution.onnx.as_is.groups import Part

Arrays = dict[str, NDArray[Any]]


def joined(parts: Sequence[Part], tensors: Sequence[HandedOn], block: str) -> Arrays:
    """What `block`, the first one of a stage, and those behind it get for a group: the sequences side by side, or where
    a tensor does not depend on them what the first one has.

    Raises ExecutionError, with block and tensor, for what is not as its maker declares it.
    """
    found: Arrays = {}
    for one in tensors:
        arrays = [_given(part.given, one, block) for part in parts]
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1:
            all_of_them = ", ".join(map(shown, sorted(shapes)))
            raise _wrong(block, one, f"came as {all_of_them} of sequences of one length")
        together = one.batch_axis is not None and len(arrays) > 1
        found[one.name] = np.concatenate(arrays, axis=one.batch_axis) if together else arrays[0]
    return found


def cut(arrays: Mapping[str, NDArray[Any]], tensors: Sequence[HandedOn], count: int) -> list[Arrays]:
    """Of each of `count` sequences what a group made of them. A graph that gives one for all, where it declares one for
    each, gives it to each. Raises ExecutionError, with block and tensor, for anything else."""
    found: list[Arrays] = [{} for _ in range(count)]
    for one in tensors:
        array, axis = arrays[one.name], one.batch_axis
        if array.ndim != one.tensor.rank:
            raise _wrong(
                one.maker.block, one, f"is {shown(array.shape)}, and its file declares {one.tensor.rank} dimensions"
            )
        length = 1 if axis is None else array.shape[axis]
        if length not in (1, count):
            raise _wrong(one.maker.block, one, f"is {shown(array.shape)} of {count} sequences, side {axis}")
        for number, own in enumerate(found):
            own[one.name] = array if axis is None or length == 1 else np.take(array, [number], axis=axis)
    return found


def _given(given: Mapping[str, NDArray[Any]], one: HandedOn, block: str) -> NDArray[Any]:
    """Checked: the tensor of one sequence."""
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
