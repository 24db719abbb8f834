"""Writes the weights of blocks: links or copies of the model's weight files, or a file of its own for each block."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from onnx import ModelProto, TensorProto

from blockrelay.host.unfinished_folder import sync
from blockrelay.onnx_blocks.model_file import external_data, tensors_of
from blockrelay_worker.offline.onnx_blocks.weight_files import ITEM_BYTES

#: Bytes that are copied and reported at a time.
_PIECE_BYTES = 8 << 20
#: Alignment of tensors in a file, so that ONNX Runtime can map them into memory.
_PAGE_BYTES = 4096
_HALF_BYTE = (TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1)

#: A function that is called with the number of bytes just written.
OnBytes = Callable[[int], None]


def stored_bytes(tensor: TensorProto) -> int:
    """Bytes of a tensor: of its elements if they are in another file, else of its whole message in the graph."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return tensor.ByteSize()
    length = int(external_data(tensor).get("length", "0"))
    if length == 0 and tensor.data_type in _HALF_BYTE:
        return (math.prod(tensor.dims) + 1) // 2
    return length or math.prod(tensor.dims) * ITEM_BYTES.get(tensor.data_type, 1)


def beside(model: ModelProto) -> Sequence[TensorProto]:
    """The model's tensors whose elements are in another file."""
    return [tensor for tensor in tensors_of(model) if tensor.data_location == TensorProto.EXTERNAL]


def linked(source: Path, to: Path) -> bool:
    """Makes `to` a hard link to the file, if it is not one yet. Creates the folder of `to`.

    False if the file system cannot link them, or if `to` is another file already, such as a copy.
    """
    source = source.resolve()
    if to.exists() and os.path.samefile(source, to):
        return True
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), to)  # resolved: a link to a relative symbolic link would be broken in this folder
    except OSError:
        return False
    return True


def copy_file(source: Path, to: Path, tell: OnBytes) -> None:
    """Copies a file, and continues an earlier copy that was interrupted; `to` exists only once it is complete.

    `tell` also gets the bytes that the earlier copy wrote. Does nothing else if `to` exists: its content is not
    compared. An earlier copy must be of the same content, which is not checked. Raises OSError if `source` becomes
    shorter meanwhile.
    """
    if to.exists():
        tell(to.stat().st_size)
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f".{to.name}.part")
    done = part.stat().st_size if part.exists() else 0
    tell(done)
    with source.open("rb") as reading, part.open("ab") as writing:
        for piece in _pieces(reading, done, source.stat().st_size - done):
            writing.write(piece)
            tell(len(piece))
    _finish(part, to)


def aligned_bytes(tensors: Sequence[TensorProto]) -> int:
    """Size of the file that `cut_weights` writes for these tensors."""
    return sum(_aligned(stored_bytes(tensor)) for tensor in tensors)


def cut_weights(folder: Path, tensors: Sequence[TensorProto], to: Path, tell: OnBytes) -> None:
    """Copies the elements of `tensors` from files in `folder` into the new file `to`, to which they refer afterwards.

    All `tensors` have their elements in other files (see `beside`), and are changed. Their locations must have been
    checked to be in `folder`. `tell` also gets the bytes of padding. `to` exists only once it is complete. Raises
    OSError for a source file that is too short.
    """
    part = to.with_name(f".{to.name}.part")
    with part.open("wb") as writing:
        for tensor in tensors:
            entries, size, place = external_data(tensor), stored_bytes(tensor), writing.tell()
            with (folder / entries["location"]).open("rb") as reading:
                for piece in _pieces(reading, int(entries.get("offset", "0")), size):
                    writing.write(piece)
                    tell(len(piece))
            writing.write(bytes(_aligned(size) - size))
            tell(_aligned(size) - size)
            del tensor.external_data[:]
            for key, value in (("location", to.name), ("offset", str(place)), ("length", str(size))):
                tensor.external_data.add(key=key, value=value)
    _finish(part, to)


def write_graph(model: ModelProto, to: Path) -> int:
    """Writes a model's graph atomically; returns the size of the file in bytes."""
    part = to.with_name(f".{to.name}.part")
    content = model.SerializeToString(deterministic=True)
    part.write_bytes(content)
    _finish(part, to)
    return len(content)


def _finish(part: Path, to: Path) -> None:
    sync(part)
    part.rename(to)


def _pieces(file: BinaryIO, offset: int, size: int) -> Iterator[bytes]:
    """Yields `size` bytes of a file from `offset` on, in pieces. Raises OSError if the file is too short."""
    file.seek(offset)
    while size > 0:
        piece = file.read(min(size, _PIECE_BYTES))
        if not piece:
            raise OSError("the model's weights have become shorter while they were copied")
        yield piece
        size -= len(piece)


def _aligned(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES
