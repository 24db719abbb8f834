"""Files that people name: read whole, up to a size, and again when they change."""

import os
from pathlib import Path

from blockrelay.errors import UsageError


def read_bounded(path: Path, most: int) -> bytes:
    """The content. UsageError, one line that names the file: it cannot be read, or is larger than `most` bytes."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if len(content) > most:
        raise UsageError(f"{path}: larger than {most >> 20} MiB")
    return content


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """Changes whenever the file does, or what a link on the way to it leads to; None while there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev
