"""Weights beside a graph ("external data"): in the folder, and as long as the graph needs them."""

import math
import ntpath
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from onnx import TensorProto

from blockrelay.errors import OnnxBlocksError

#: Bytes of an element, of types that have whole ones.
ITEM_BYTES: Mapping[int, int] = {
    **dict.fromkeys((TensorProto.BOOL, TensorProto.INT8, TensorProto.UINT8), 1),
    **dict.fromkeys((TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT16, TensorProto.UINT16), 2),
    **dict.fromkeys((TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT32), 4),
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.INT64, TensorProto.UINT64), 8),
}


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
        owner = str(tensor.name)  # protobuf gives bytes where a file has no UTF-8
        said = {str(entry.key): str(entry.value) for entry in tensor.external_data}
        name = said.get("location", "")
        if name not in sizes:
            sizes[name] = check_inside(folder, name, file=file, tensor=owner).stat().st_size
        offset, length = _number(said, "offset", file, owner), _number(said, "length", file, owner)
        needed = ITEM_BYTES[tensor.data_type] * math.prod(tensor.dims) if tensor.data_type in ITEM_BYTES else 0
        if length and needed and length != needed:
            raise OnnxBlocksError(f"has {length} bytes in {name}, and needs {needed}", file=file, tensor=owner)
        end = offset + (length or needed)
        if end > sizes[name]:
            raise OnnxBlocksError(
                f"ends at byte {end} of {name}, which has {sizes[name]}: altered or cut off",
                file=file,
                tensor=owner,
            )
    return tuple(sorted(sizes))


def _number(said: dict[str, str], key: str, file: str, owner: str) -> int:
    text = said.get(key, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise OnnxBlocksError(f"has {text[:40]!r} as the {key} of its weights", file=file, tensor=owner)
    return int(text)
