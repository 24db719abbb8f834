"""Weights of blocks: in the model's own files, which all blocks refer to, or cut into a file for each block."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from onnx import ModelProto, TensorProto

from blockrelay.host.unfinished_folder import sync
from blockrelay.onnx_blocks.model_file import tensors_of
from blockrelay_worker.offline.onnx_blocks.weight_files import ITEM_BYTES

#: What is written is told in pieces of this size.
_PIECE_BYTES = 8 << 20
#: Of places in a file, so that ONNX Runtime can map tensors into memory.
_PAGE_BYTES = 4096
_HALF_BYTE = (TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1)

Told = Callable[[int], None]


def stored_bytes(tensor: TensorProto) -> int:
    """What the elements of a tensor take, wherever they are."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return tensor.ByteSize()
    length = int(_said(tensor).get("length", "0"))
    if length == 0 and tensor.data_type in _HALF_BYTE:
        return (math.prod(tensor.dims) + 1) // 2
    return length or math.prod(tensor.dims) * ITEM_BYTES.get(tensor.data_type, 1)


def beside(model: ModelProto) -> Sequence[TensorProto]:
    """The tensors whose elements are in another file."""
    return [tensor for tensor in tensors_of(model) if tensor.data_location == TensorProto.EXTERNAL]


def linked(source: Path, to: Path) -> bool:
    """Whether the file has now, or had already, a second name. False where the file system has none."""
    source = source.resolve()
    if to.exists() and os.path.samefile(source, to):
        return True
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), to)  # of a link itself another folder could make nothing
    except OSError:
        return False
    return True


def copy_file(source: Path, to: Path, tell: Told) -> None:
    """A copy that goes on where an earlier one has ended; `to` is there when it is whole."""
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
    """How long the file is that `cut_weights` writes."""
    return sum(_aligned(stored_bytes(tensor)) for tensor in tensors)


def cut_weights(folder: Path, tensors: Sequence[TensorProto], to: Path, tell: Told) -> None:
    """Write the elements of these tensors, which are in files of `folder`, into `to`; the tensors name that place."""
    part = to.with_name(f".{to.name}.part")
    with part.open("wb") as writing:
        for tensor in tensors:
            said, size, place = _said(tensor), stored_bytes(tensor), writing.tell()
            with (folder / said["location"]).open("rb") as reading:
                for piece in _pieces(reading, int(said.get("offset", "0")), size):
                    writing.write(piece)
                    tell(len(piece))
            writing.write(bytes(_aligned(size) - size))
            tell(_aligned(size) - size)
            del tensor.external_data[:]
            for key, value in (("location", to.name), ("offset", str(place)), ("length", str(size))):
                tensor.external_data.add(key=key, value=value)
    _finish(part, to)


def write_graph(model: ModelProto, to: Path) -> int:
    """The file is there whole or not at all. How many bytes it has."""
    part = to.with_name(f".{to.name}.part")
    content = model.SerializeToString(deterministic=True)
    part.write_bytes(content)
    _finish(part, to)
    return len(content)


def _finish(part: Path, to: Path) -> None:
    sync(part)
    part.rename(to)


def _pieces(file: BinaryIO, offset: int, size: int) -> Iterator[bytes]:
    """Raises OSError where the file has been cut off since it was looked at."""
    file.seek(offset)
    while size > 0:
        piece = file.read(min(size, _PIECE_BYTES))
        if not piece:
            raise OSError("the model's weights have become shorter while they were copied")
        yield piece
        size -= len(piece)


def _aligned(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _said(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}
