"""Files that people name: read whole, up to a size."""

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
