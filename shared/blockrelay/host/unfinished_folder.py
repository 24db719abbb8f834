"""Writes a folder atomically: it exists whole or not at all, and an interrupted run can be continued."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from blockrelay.errors import OnnxBlocksError, UsageError

#: A file in an unfinished folder that says what is being written.
_MARK = "unfinished.json"


def is_finished(out: Path, of: str) -> bool:
    """Returns whether `out` is whole and still has the mark of an `unfinished_folder` with this `of`; removes the mark.

    A run that was ended just before its last step leaves such a folder.
    """
    if out.is_symlink() or not _is_of(out, of):
        return False
    (out / _MARK).unlink()
    return True


def check_free(out: Path) -> None:
    """Raises UsageError if `out` is anything but an empty folder or nothing."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} exists and is not a folder")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} exists and is not empty")


@contextlib.contextmanager
def unfinished_folder(out: Path, of: str, *, afresh: bool = False) -> Iterator[Path]:
    """Yields a folder beside `out` to write into, which is renamed to `out` when the body ends well.

    `of` is a text that says what is written, with all options; a mark in the folder has it. A new folder has only the
    mark; else the folder is as the last run with an equal `of` left it. When the body fails, the folder stays for the
    next run. It is deleted when the body raises OnnxBlocksError (the input is refused). A new folder is also deleted
    when the body raises UsageError (it cannot be written).

    Only the folder itself is synced to the disk here: the body must `sync` the files that it writes.

    Raises UsageError on Windows, if `out` is taken, if another process writes there, or if the folder has something
    else that is unfinished; `afresh` deletes that instead.
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
    import fcntl  # Windows does not have it

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
    """Waits until a file or folder is on the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
