"""Messages between a worker and the process of its device: a few fields and arrays, over a pipe.

A message is its length, its fields in msgpack, and the bytes of its arrays one after the other. The fields hold the
types and shapes of the arrays. Both ends are of one release, on one host, so there is no version.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

#: The kind of a message before the answer: the process has done a part of something that takes long.
GOES_ON = "goes on"
_LENGTH = struct.Struct("<Q")
#: More bytes than any message has: a larger length means that the stream is broken.
_MAX_FRAME_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer. `kind` names it; `fields` are numbers, texts, and lists and maps of them."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    arrays: Sequence[NDArray[Any]] = ()


class PipeClosed(Exception):
    """Raised when the other end has closed the pipe, between two messages or within one."""


def write(stream: BinaryIO, message: Message) -> None:
    """Sends `message` and flushes. Raises OSError (BrokenPipeError) when the other end no longer reads."""
    arrays = [array if array.flags.c_contiguous else np.ascontiguousarray(array) for array in message.arrays]
    about = [(array.dtype.str, array.shape) for array in arrays]
    head = cast(bytes, msgpack.packb((message.kind, message.fields, about)))
    stream.write(_LENGTH.pack(len(head)))
    stream.write(head)
    for array in arrays:
        if array.nbytes:
            stream.write(array.reshape(-1).view(np.uint8).data)
    stream.flush()


def read(stream: BinaryIO) -> Message:
    """Returns the next message, whose arrays are new and writable. Raises PipeClosed when the stream ends, and for a
    length that no message has. Raises OSError if the pipe cannot be read."""
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    if length > _MAX_FRAME_BYTES:
        raise PipeClosed
    kind, fields, about = msgpack.unpackb(_exactly(stream, length), strict_map_key=False)
    arrays: list[NDArray[Any]] = []
    for dtype, shape in about:
        array = np.empty(shape, np.dtype(dtype))
        if array.nbytes:
            _into(stream, array.reshape(-1).view(np.uint8).data)
        arrays.append(array)
    return Message(kind, fields, arrays)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise PipeClosed
    return content


def _into(stream: BinaryIO, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = stream.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            raise PipeClosed
        done += count
