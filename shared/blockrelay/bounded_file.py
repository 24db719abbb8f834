"""Reads files that users name, up to a size limit, and tells when they change."""

import os
from pathlib import Path

from blockrelay.errors import UsageError


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a file.

    Raises UsageError, one line that names the file, if it cannot be read or is larger than `max_bytes` bytes.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if len(content) > max_bytes:
        raise UsageError(f"{path}: larger than {max_bytes >> 20} MiB")
    return content


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """Returns a value that changes when the file, or a symbolic link on its path, does; None while there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev
