"""Reads a text file that a user names on the command line."""

from pathlib import Path

from blockrelay.errors import UsageError


def read_text_file(path: Path) -> str:
    """Returns the content of a UTF-8 file.

    Raises UsageError if it cannot be read, is empty, is not UTF-8, or holds NUL bytes.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if not raw:
        raise UsageError(f"{path}: is empty")
    try:
        content = raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 (byte {error.start})") from error
    if "\0" in content:
        raise UsageError(f"{path}: is not a text file: it holds NUL bytes")
    return content
