"""Where weights beside a graph lie ("external data"). Others wrote that down, so nothing of it is trusted."""

import ntpath
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from blockrelay.block_folder.hub_cache import is_within
from blockrelay.block_folder.lfs_pointer import IS_POINTER, is_lfs_pointer
from blockrelay.errors import OnnxBlocksError


def check_inside(folder: Path, name: str, *, file: str, tensor: str | None = None) -> Path:
    """The path of the file `name` in the folder, which is a plain file and lies there with all links followed; of a
    snapshot in Hugging Face's cache, where each file is a link, within the snapshot's repository.

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
    if not is_within(resolved, folder):
        raise OnnxBlocksError(f"{name!r} is a link out of the folder", file=file, tensor=tensor)
    if not stat.S_ISREG(mode):
        raise OnnxBlocksError(f"{name!r} is not a plain file", file=file, tensor=tensor)
    return path


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """Where the numbers of a tensor lie: in the file `path`, which is called `name` in the folder."""

    name: str
    path: Path
    offset: int


def weight_place(folder: Path, said: Mapping[str, str], *, needed: int, file: str, owner: str) -> WeightPlace:
    """Of the tensor `owner`, of `needed` bytes (0: not known), of which `file` has said where it lies. Raises
    OnnxBlocksError for a file that is not in the folder, or ends before the tensor does."""
    name = said.get("location", "")
    path = check_inside(folder, name, file=file, tensor=owner)
    offset, length = _number(said, "offset", file, owner), _number(said, "length", file, owner)
    if length and needed and length != needed:
        raise OnnxBlocksError(f"has {length} bytes in {name}, and needs {needed}", file=file, tensor=owner)
    if is_lfs_pointer(path):
        raise OnnxBlocksError(f"lies in {name}, which {IS_POINTER}", file=file, tensor=owner)
    end, size = offset + (length or needed), path.stat().st_size
    if end > size:
        message = f"ends at byte {end} of {name}, which has {size}: altered or cut off"
        raise OnnxBlocksError(message, file=file, tensor=owner)
    return WeightPlace(name, path, offset)


def _number(said: Mapping[str, str], key: str, file: str, owner: str) -> int:
    """The offset or the length that a file says of the weights `owner`. Raises OnnxBlocksError for what is none."""
    text = said.get(key, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise OnnxBlocksError(f"has {text[:40]!r} as the {key} of its weights", file=file, tensor=owner)
    return int(text)
