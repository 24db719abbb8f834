"""A folder that is there whole or not at all, whose writing goes on where it was broken off."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from blockrelay.errors import OnnxBlocksError, UsageError

#: In a folder that is not finished: what is being written into it.
_MARK = "unfinished.json"


def is_finished(out: Path, of: str) -> bool:
    """Whether `out` has all of what `of` names: a run was ended when only the mark was left to remove, which is done
    here."""
    if out.is_symlink() or not _is_of(out, of):
        return False
    (out / _MARK).unlink()
    return True


def check_free(out: Path) -> None:
    """Raises UsageError where something is that is not an empty folder."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} exists and is not a folder")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} exists and is not empty")


@contextlib.contextmanager
def unfinished_folder(out: Path, of: str, *, afresh: bool = False) -> Iterator[Path]:
    """A folder beside `out`, empty or as the last run that wrote the same (`of`) left it, which is renamed to `out`
    when the body ends well.

    It stays for the next run when the body fails; but it goes when an OnnxBlocksError refuses what it is made of, and a
    new one when a UsageError says that it cannot be written. Raises UsageError where `out` is taken, another process
    writes there, or something else was left unfinished; `afresh` removes that.
    """
    if sys.platform == "win32":
        raise UsageError("blocks are written on Linux and macOS only: folders cannot be locked here")
    check_free(out)
    folder = out.with_name(f".{out.name}.unfinished")
    new_parents = [parent for parent in out.parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    with _locked(folder):
        if afresh and not _is_of(folder, of):
            for left in folder.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        is_new = not any(folder.iterdir())
        if is_new:
            (folder / _MARK).write_text(of, encoding="utf-8")
        elif not _is_of(folder, of):
            raise UsageError(f"{folder} was left by a run about something else, or with other options: remove it first")
        try:
            yield folder
        except (UsageError, OnnxBlocksError) as refusal:
            if is_new or isinstance(refusal, OnnxBlocksError):
                shutil.rmtree(folder)
                for parent in new_parents:
                    parent.rmdir()
            raise
        sync(folder)
        check_free(out)
        folder.rename(out)
    (out / _MARK).unlink()
    sync(out)
    sync(out.parent)


def _is_of(folder: Path, of: str) -> bool:
    try:
        return (folder / _MARK).read_text(encoding="utf-8") == of
    except (OSError, UnicodeDecodeError):
        return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    assert sys.platform != "win32"
    import fcntl  # which Windows has not

    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{folder} is being written by another process") from None
        yield
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """A file or a folder is on the disk behind this."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
