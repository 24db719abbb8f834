"""Named tensors that stages of ONNX blocks made by others hand to the next stage, and their bytes in a message. Pure.

Blockrelay's own stages hand on one float32 matrix, whose bytes need no description. ONNX blocks made by others hand on
many arrays of any dtype and shape, which are msgpack through `codec`. Parts of equal length and shapes, such as the
decode steps of a batch, are stacked into one array with a leading axis: copying them costs less than packing many small
arrays one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import WireError
from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.checks import count, items, text

#: Most tensors of one part, and most bytes of a tensor's name.
MAX_TENSORS, MAX_NAME_BYTES = 256, 512
#: Most bytes of the tensors of one message, as `weight` counts them. It is four times the 64 MiB of 512 tokens with
#: 32 k float32 values, more than any model hands on at once, and half of what Redis takes as one value.
MAX_MESSAGE_WEIGHT = 256 << 20
#: Bytes that `weight` adds for each array and each part: more than their description takes in a message.
_BESIDE = 1024
#: Most values of one list in a message: more than MAX_MESSAGE_WEIGHT has parts.
_LONGEST = MAX_MESSAGE_WEIGHT // _BESIDE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedTensors:
    """The tensors of consecutive tokens of one request, from the ONNX blocks of earlier stages to later ones."""

    rows: int  # number of tokens
    #: Each tensor by its name, as the block returns it for this one sequence: in the block's dtype, and with a batch
    #: axis of length 1 where the tensor has a batch axis.
    arrays: Mapping[str, NDArray[Any]]


def weight(parts: Sequence[NamedTensors]) -> int:
    """Returns the bytes that the parts count towards MAX_MESSAGE_WEIGHT."""
    return sum(_BESIDE + sum(_BESIDE + array.nbytes for array in part.arrays.values()) for part in parts)


def why_not_sent(parts: Sequence[NamedTensors]) -> str:
    """Returns why no message can hold these parts of a segment; empty if one can."""
    arrays = [item for part in parts for item in part.arrays.items()]
    if tensors := max((len(part.arrays) for part in parts if len(part.arrays) > MAX_TENSORS), default=0):
        return f"{tensors} tensors, and the limit is {MAX_TENSORS}"
    if odd := {array.dtype.name for _, array in arrays if array.dtype.str not in codec.ALLOWED_DTYPES}:
        return f"tensors of {', '.join(sorted(odd))}, which no message has"
    if long := next((name for name, _ in arrays if len(name.encode()) > MAX_NAME_BYTES), ""):
        return f"a tensor whose name is longer than {MAX_NAME_BYTES} bytes: {long:.40}..."
    if weight(parts) > MAX_MESSAGE_WEIGHT:
        size, limit = (sum(array.nbytes for _, array in arrays) >> 20), MAX_MESSAGE_WEIGHT >> 20
        return f"{size} MiB in {len(arrays)} tensors, and the limit is {limit} MiB: lower BLOCKRELAY_MAX_ROWS"
    return ""


def pack_tensors(segments: Sequence[Sequence[NamedTensors]]) -> bytes:
    """Returns the parts of each segment as bytes for `unpack_tensors`.

    The caller must have checked that `why_not_sent` is empty for each segment, and that all parts together weigh
    MAX_MESSAGE_WEIGHT at most.
    """
    parts = [part for segment in segments for part in segment]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, part in enumerate(parts):
        arrays = part.arrays.items()
        alike.setdefault((part.rows, *((name, a.dtype.str, a.shape) for name, a in arrays)), []).append(index)
    groups = [
        [members, parts[members[0]].rows, [[name, _stacked(parts, members, name)] for name in parts[members[0]].arrays]]
        for members in alike.values()
    ]
    return codec.pack({"parts": [len(segment) for segment in segments], "groups": groups})


def unpack_tensors(data: bytes, rows: Sequence[int]) -> tuple[tuple[NamedTensors, ...], ...]:
    """Returns the parts of each segment; `rows` has the number of tokens of each. Arrays are read-only views.

    Call it inside `checks.reading`, which makes WireErrors: when there are too many tensors or bytes, an array does not
    have the size that it says, or the parts of a segment do not have its number of tokens.
    """
    message = codec.unpack(data, max_bytes=MAX_MESSAGE_WEIGHT, longest=_LONGEST)
    counts = [count(number) for number in items(message["parts"])]
    by_index: dict[int, NamedTensors] = {}
    weighs = 0
    for members, own_rows, arrays in map(items, items(message["groups"])):
        named = _named(items(arrays), len(items(members)))
        weighs += len(members) * _BESIDE * (1 + len(named)) + sum(array.nbytes for array in named.values())
        if weighs > MAX_MESSAGE_WEIGHT:
            raise WireError(f"tensors of more than {MAX_MESSAGE_WEIGHT >> 20} MiB in one message")
        for place, index in enumerate(items(members)):
            if count(index) in by_index:
                raise WireError(f"part {index} comes twice")
            own = {name: array[place, ...] for name, array in named.items()}
            by_index[index] = NamedTensors(rows=count(own_rows), arrays=own)
    if len(counts) != len(rows) or sorted(by_index) != list(range(len(by_index))) or sum(counts) != len(by_index):
        raise WireError(f"{len(by_index)} parts are not those of {len(rows)} segments")
    ordered = iter(by_index[index] for index in range(len(by_index)))
    segments = tuple(tuple(next(ordered) for _ in range(number)) for number in counts)
    for parts, expected in zip(segments, rows, strict=True):
        if sum(part.rows for part in parts) != expected or not all(part.rows for part in parts):
            raise WireError(f"parts of {[part.rows for part in parts]!r:.60} rows are not a segment of {expected}")
    return segments


def _stacked(parts: Sequence[NamedTensors], members: Sequence[int], name: str) -> NDArray[Any]:
    """Returns the tensor `name` of all members, stacked along a new first axis; a single member is not copied."""
    if len(members) == 1:
        return parts[members[0]].arrays[name][np.newaxis]
    return np.stack([parts[index].arrays[name] for index in members])


def _named(arrays: Sequence[Any], members: int) -> dict[str, NDArray[Any]]:
    """Returns the stacked arrays of a group by name. Raises WireError unless each has `members` parts."""
    if len(arrays) > MAX_TENSORS:
        raise WireError(f"{len(arrays)} tensors, and a part may have {MAX_TENSORS}")
    named: dict[str, NDArray[Any]] = {}
    for name, array in map(items, arrays):
        if len(text(name).encode()) > MAX_NAME_BYTES or name in named:
            raise WireError(f"{name!r:.60} comes twice, or is longer than {MAX_NAME_BYTES} bytes")
        if not isinstance(array, np.ndarray) or array.shape[:1] != (members,):
            raise WireError(f"{name!r:.60} is no array of {members} parts")
        named[name] = array
    return named
