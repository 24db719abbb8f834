"""Files that Git LFS left in place of large ones: a clone without `git lfs` has three lines of text instead."""

from pathlib import Path

from blockrelay.errors import UsageError

_BEGINNING = b"version https://git-lfs.github.com/spec/"
_LONGEST = 1024
#: What messages say of one.
IS_POINTER = "is a Git LFS pointer in place of the file: `git lfs pull` in the folder fetches it"


def is_lfs_pointer(path: Path) -> bool:
    """True for a readable file that is a pointer."""
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST:
            return False
        with path.open("rb") as file:
            return file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return False


def refuse_lfs_pointer(path: Path) -> None:
    """UsageError, with the remedy, for a file that is a pointer."""
    if is_lfs_pointer(path):
        raise UsageError(f"{path} {IS_POINTER}")
