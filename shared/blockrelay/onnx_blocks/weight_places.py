"""Finds and checks the weights that lie beside a graph ("external data" of ONNX).

Others wrote the paths and offsets, so nothing of them is trusted.
"""

import ntpath
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from blockrelay.block_folder.hub_cache import is_within
from blockrelay.block_folder.lfs_pointer import IS_POINTER, is_lfs_pointer
from blockrelay.errors import OnnxBlocksError


def check_inside(folder: Path, name: str, *, file: str, tensor: str | None = None) -> Path:
    """Returns the path of the file `name` in `folder`, after checking that it is a plain file and lies in there.

    Links are followed: their target must be in the folder too, or, for a snapshot in Hugging Face's cache, in the
    snapshot's repository. Raises OnnxBlocksError with `file` and `tensor`, which name the weights.
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
    if not is_within(resolved, folder):
        raise OnnxBlocksError(f"{name!r} is a link out of the folder", file=file, tensor=tensor)
    if not stat.S_ISREG(mode):
        raise OnnxBlocksError(f"{name!r} is not a plain file", file=file, tensor=tensor)
    return path


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """The place of a tensor's numbers in a file beside the graph."""

    name: str
    """The file's name in the folder."""
    path: Path
    offset: int
    """In bytes."""


def weight_place(folder: Path, entries: Mapping[str, str], *, needed: int, file: str, owner: str) -> WeightPlace:
    """Returns the place of the tensor `owner` of the graph `file`, which has `needed` bytes (0: not known).

    `entries` are the tensor's external data in the graph: `location`, and `offset` and `length`, decimal numbers of
    bytes (0 without the entry). Raises OnnxBlocksError for an offset or length that is no number, and for another
    length than `needed`. It also raises it for a file that is not in `folder`, is a Git LFS pointer, or ends before the
    tensor does.
    """
    name = entries.get("location", "")
    path = check_inside(folder, name, file=file, tensor=owner)
    offset, length = _number(entries, "offset", file, owner), _number(entries, "length", file, owner)
    if length and needed and length != needed:
        raise OnnxBlocksError(f"has {length} bytes in {name}, and needs {needed}", file=file, tensor=owner)
    if is_lfs_pointer(path):
        raise OnnxBlocksError(f"lies in {name}, which {IS_POINTER}", file=file, tensor=owner)
    end, size = offset + (length or needed), path.stat().st_size
    if end > size:
        message = f"ends at byte {end} of {name}, which has {size}: altered or cut off"
        raise OnnxBlocksError(message, file=file, tensor=owner)
    return WeightPlace(name, path, offset)


def _number(entries: Mapping[str, str], key: str, file: str, owner: str) -> int:
    """Returns the number `key` of the external data of tensor `owner`. Raises OnnxBlocksError if it is no number."""
    text = entries.get(key, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise OnnxBlocksError(f"has {text[:40]!r} as the {key} of its weights", file=file, tensor=owner)
    return int(text)
