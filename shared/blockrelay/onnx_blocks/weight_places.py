"""Where weights beside a graph lie ("external data"). Others wrote that down, so nothing of it is trusted."""

import ntpath
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

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


def stored_number(said: Mapping[str, str], key: str, file: str, owner: str) -> int:
    """The offset or the length that a file says of the weights `owner`. Raises OnnxBlocksError for what is none."""
    text = said.get(key, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise OnnxBlocksError(f"has {text[:40]!r} as the {key} of its weights", file=file, tensor=owner)
    return int(text)
