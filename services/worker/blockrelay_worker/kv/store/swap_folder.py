"""The folder on a disk for KV pages of preempted runs, whose old pages go when the first worker opens it."""

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

from blockrelay.errors import UsageError
from blockrelay_worker.kv.store.file_tier import is_of_a_tier

_LOCK = "lock"


def open_swap_folder(folder: Path) -> int:
    """Makes the folder, or removes all pages from one that no process has open; returns a handle that keeps it open.

    It belongs to this user and has mode 0700: its files have the contents of requests. Files that are no pages stay.
    The lock ends with the process, however that ends. Raises UsageError for a folder that cannot be used.
    """
    if sys.platform == "win32":
        raise UsageError("BLOCKRELAY_SWAP_FOLDER: Windows has no folder for KV pages of preempted requests")
    import fcntl  # Windows does not have it

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise UsageError(f"BLOCKRELAY_SWAP_FOLDER: {folder} must be a folder of this user with mode 0700")
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with suppress(BlockingIOError):  # another worker uses it
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in filter(lambda path: is_of_a_tier(path.name), folder.iterdir()):
                    path.unlink()
            fcntl.flock(handle, fcntl.LOCK_SH)
        except BaseException:
            os.close(handle)
            raise
    except OSError as error:
        raise UsageError(f"BLOCKRELAY_SWAP_FOLDER: {error}") from error
    return handle
