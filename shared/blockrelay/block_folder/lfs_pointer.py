"""Recognises Git LFS pointers: the three lines of text that a clone without `git lfs` has in place of a large file."""

from pathlib import Path

from blockrelay.errors import UsageError

_BEGINNING = b"version https://git-lfs.github.com/spec/"
_LONGEST = 1024
#: The end of an error message about a Git LFS pointer, with the remedy.
IS_POINTER = "is a Git LFS pointer in place of the file: `git lfs pull` in the folder fetches it"


def is_lfs_pointer(path: Path) -> bool:
    """Returns whether `path` is a Git LFS pointer; False if it cannot be read."""
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST:
            return False
        with path.open("rb") as file:
            return file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return False


def refuse_lfs_pointer(path: Path) -> None:
    """Raises UsageError, with the remedy, if `path` is a Git LFS pointer."""
    if is_lfs_pointer(path):
        raise UsageError(f"{path} {IS_POINTER}")
