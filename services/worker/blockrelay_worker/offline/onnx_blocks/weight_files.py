"""Weights beside a graph ("external data"): in the folder, and as long as the graph needs them."""

import math
import ntpath
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from onnx import TensorProto, helper

from blockrelay.errors import OnnxBlocksError


def check_inside(folder: Path, name: str, *, file: str, tensor: str | None = None) -> Path:
    """The path of the file `name` in the folder, which is a plain file and lies there with all links followed.

    Raises OnnxBlocksError; `file` and `tensor` are who names it.
    """
    location = PurePosixPath(name)
    if not name or "\0" in name or location.is_absolute() or ntpath.splitdrive(name)[0] or "\\" in name:
        raise OnnxBlocksError(f"names weights by a path that is none in the folder: {name!r}", file=file, tensor=tensor)
    if ".." in location.parts:
        raise OnnxBlocksError(f"names weights outside the folder: {name!r}", file=file, tensor=tensor)
    path = folder / name
    try:
        resolved = path.resolve(strict=True)
        mode = resolved.stat().st_mode
    except (OSError, RuntimeError):
        raise OnnxBlocksError(f"{name!r} is missing or cannot be read", file=file, tensor=tensor) from None
    if not resolved.is_relative_to(folder.resolve()):
        raise OnnxBlocksError(f"{name!r} is a link out of the folder", file=file, tensor=tensor)
    if not stat.S_ISREG(mode):
        raise OnnxBlocksError(f"{name!r} is not a plain file", file=file, tensor=tensor)
    return path


def check_weights(folder: Path, file: str, tensors: Iterable[TensorProto]) -> tuple[str, ...]:
    """The files in which the tensors lie that are not in `file` itself. Raises OnnxBlocksError for one that is not in
    the folder, or ends before the tensor does."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        said = {entry.key: entry.value for entry in tensor.external_data}
        name = said.get("location", "")
        if name not in sizes:
            sizes[name] = check_inside(folder, name, file=file, tensor=tensor.name).stat().st_size
        offset, length = _number(said, "offset", file, tensor), _number(said, "length", file, tensor)
        needed = _bytes(tensor)
        if length and needed is not None and length != needed:
            raise OnnxBlocksError(f"has {length} bytes in {name}, and needs {needed}", file=file, tensor=tensor.name)
        end = offset + (length or needed or 0)
        if end > sizes[name]:
            raise OnnxBlocksError(
                f"ends at byte {end} of {name}, which has {sizes[name]}: altered or cut off",
                file=file,
                tensor=tensor.name,
            )
    return tuple(sorted(sizes))


def _number(said: dict[str, str], key: str, file: str, tensor: TensorProto) -> int:
    text = said.get(key, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise OnnxBlocksError(f"has {text[:40]!r} as the {key} of its weights", file=file, tensor=tensor.name)
    return int(text)


def _bytes(tensor: TensorProto) -> int | None:
    """None for types of which elements share a byte."""
    try:
        size = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, TypeError):
        return None
    packed = (TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1, TensorProto.STRING)
    return None if tensor.data_type in packed or size == 0 else size * math.prod(tensor.dims)
