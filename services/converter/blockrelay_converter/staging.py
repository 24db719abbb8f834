"""Writes a folder that exists completely or not at all: under another name beside its place, then renamed."""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from blockrelay.block_folder.manifest import MANIFEST_NAME
from blockrelay.errors import UsageError
from blockrelay.host.unfinished_folder import sync


@contextlib.contextmanager
def staged_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Yields an empty folder beside `out`; it becomes `out` when the body ends well and is removed when it raises.

    A killed process leaves `.<name>.<random>.partial`, which the next conversion to the same place removes; a lock on
    the folder tells it from one that is still being written. Raises UsageError if `out` is taken, before the body or
    after it: `out` may be an empty folder or, with `force`, a block folder.
    """
    out = out.absolute()
    _check_free(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out)
    staging = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    staging.mkdir()
    handle = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield staging
        _sync_tree(staging)
        _check_free(out, force)
        _replace(staging, out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def _check_free(out: Path, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise UsageError(f"{out} exists and is not a folder")
    if any(out.iterdir()):
        if not force:
            raise UsageError(f"{out} exists and is not empty (--force replaces a block folder)")
        if not (out / MANIFEST_NAME).is_file():
            raise UsageError(f"{out} is not a block folder: --force does not replace it")


def _remove_abandoned(out: Path) -> None:
    for left in out.parent.glob(f".{out.name}.*.partial"):
        with contextlib.suppress(OSError):
            handle = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)


def _replace(staging: Path, out: Path) -> None:
    old = None
    if out.exists():
        # A name that `_remove_abandoned` knows: if this process is killed now, the next conversion removes the folder.
        old = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
        out.rename(old)
    staging.rename(out)
    sync(out.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        for name in files:
            sync(Path(place, name))
        sync(Path(place))
