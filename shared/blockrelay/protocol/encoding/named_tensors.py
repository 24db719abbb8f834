"""Tensors by name that stages of ONNX blocks which others made hand on, and their bytes in a message. Pure.

The rows of our own stages are one float32 matrix, whose bytes need no description. These are many arrays of any dtype
and shape, so they are msgpack through `codec`. Parts of equal rows and shapes, such as the decode steps of a batch,
lie in one array with an axis of parts before their own: the many small arrays of a batch would cost more to pack and
unpack one by one than to copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import WireError
from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.checks import count, items, text

#: Tensors of one part, and bytes of a name.
MAX_TENSORS, MAX_NAME_BYTES = 256, 512
#: Of the tensors of one message, as `weight` counts them: four times the 64 MiB that 512 rows of 32 k float32 values
#: have, which is more than any model hands on at once, and half of what Redis takes as one value.
MAX_MESSAGE_WEIGHT = 256 << 20
#: What an array and a part count beside their bytes: more than is said of them in a message, and what an array costs
#: that has none.
_BESIDE = 1024
#: Values of one list in such a message: more than there are parts, or there is room for.
_LONGEST = MAX_MESSAGE_WEIGHT // _BESIDE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedTensors:
    """What ONNX blocks of earlier stages made of `rows` consecutive rows of one request, and later blocks take.

    `arrays` has each tensor by its name, as the block gives it for one sequence of these rows: in the block's own
    dtype, with a batch axis of length 1 where the tensor has one.
    """

    rows: int
    arrays: Mapping[str, NDArray[Any]]


def weight(parts: Sequence[NamedTensors]) -> int:
    """Bytes that the parts count in a message, which may have MAX_MESSAGE_WEIGHT."""
    return sum(_BESIDE + sum(_BESIDE + array.nbytes for array in part.arrays.values()) for part in parts)


def why_not_sent(parts: Sequence[NamedTensors]) -> str:
    """Why no message can hold these parts of a segment; empty where one can."""
    arrays = [item for part in parts for item in part.arrays.items()]
    if most := max((len(part.arrays) for part in parts if len(part.arrays) > MAX_TENSORS), default=0):
        return f"{most} tensors, and the limit is {MAX_TENSORS}"
    if odd := {array.dtype.name for _, array in arrays if array.dtype.str not in codec.ALLOWED_DTYPES}:
        return f"tensors of {', '.join(sorted(odd))}, which no message has"
    if long := next((name for name, _ in arrays if len(name.encode()) > MAX_NAME_BYTES), ""):
        return f"a tensor whose name is longer than {MAX_NAME_BYTES} bytes: {long:.40}..."
    if weight(parts) > MAX_MESSAGE_WEIGHT:
        size, most = (sum(array.nbytes for _, array in arrays) >> 20), MAX_MESSAGE_WEIGHT >> 20
        return f"{size} MiB in {len(arrays)} tensors, and the limit is {most} MiB: lower BLOCKRELAY_MAX_ROWS"
    return ""


def pack_tensors(segments: Sequence[Sequence[NamedTensors]]) -> bytes:
    """The parts of each segment as the bytes that `unpack_tensors` reads. They weigh MAX_MESSAGE_WEIGHT at most, and
    `why_not_sent` has nothing against any."""
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
    """The parts of each segment, of which there are as many as `rows` of them; views of memory that is read-only.

    Raises WireError (or what `checks.reading` makes one of) when there are too many tensors or bytes, an array has
    another size than it says, or the parts of a segment are not its rows.
    """
    message = codec.unpack(data, most=MAX_MESSAGE_WEIGHT, longest=_LONGEST)
    counts = [count(number) for number in items(message["parts"])]
    found: dict[int, NamedTensors] = {}
    weighs = 0
    for members, own_rows, arrays in map(items, items(message["groups"])):
        named = _named(items(arrays), len(items(members)))
        weighs += len(members) * _BESIDE * (1 + len(named)) + sum(array.nbytes for array in named.values())
        if weighs > MAX_MESSAGE_WEIGHT:
            raise WireError(f"tensors of more than {MAX_MESSAGE_WEIGHT >> 20} MiB in one message")
        for place, index in enumerate(items(members)):
            if count(index) in found:
                raise WireError(f"part {index} comes twice")
            own = {name: array[place, ...] for name, array in named.items()}
            found[index] = NamedTensors(rows=count(own_rows), arrays=own)
    if len(counts) != len(rows) or sorted(found) != list(range(len(found))) or sum(counts) != len(found):
        raise WireError(f"{len(found)} parts are not those of {len(rows)} segments")
    ordered = iter(found[index] for index in range(len(found)))
    segments = tuple(tuple(next(ordered) for _ in range(number)) for number in counts)
    for parts, expected in zip(segments, rows, strict=True):
        if sum(part.rows for part in parts) != expected or not all(part.rows for part in parts):
            raise WireError(f"parts of {[part.rows for part in parts]!r:.60} rows are not a segment of {expected}")
    return segments


def _stacked(parts: Sequence[NamedTensors], members: Sequence[int], name: str) -> NDArray[Any]:
    """The tensor of all members, along an axis of their own; of one alone nothing is copied."""
    if len(members) == 1:
        return parts[members[0]].arrays[name][np.newaxis]
    return np.stack([parts[index].arrays[name] for index in members])


def _named(arrays: Sequence[Any], members: int) -> dict[str, NDArray[Any]]:
    """The arrays of a group by name. Raises WireError unless each has `members` parts."""
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
