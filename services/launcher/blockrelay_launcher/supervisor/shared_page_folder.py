"""Makes the folder in memory through which the workers of one `up` share KV pages.

ROOT/blockrelay-<random>/          the KV pages, and
ROOT/blockrelay-<random>/owner     locked while its `up` runs; contains the path of its data folder

The lock ends with the process, however that ends, and the next `up` removes folders without a living owner.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from blockrelay.host.memory import available_bytes
from blockrelay_launcher.policy import OWNERLESS_FOLDER_S, PAGE_STORE_MEMORY_SHARE, PAGE_STORE_ROOM_SHARE

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "blockrelay-"
_OWNER = "owner"


def default_limit(root: Path = SHARED_MEMORY) -> int:
    """Returns the bytes of KV pages that this machine can spare; 0 if it has no folder in memory."""
    try:
        room = shutil.disk_usage(root).free
    except OSError:
        return 0
    return int(min(available_bytes() * PAGE_STORE_MEMORY_SHARE, room * PAGE_STORE_ROOM_SHARE))


@contextlib.contextmanager
def open_page_folder(root: Path = SHARED_MEMORY, *, data: Path | None = None) -> Iterator[Path | None]:
    """Yields a new empty folder, which is removed at the end, or None if `root` is not writable.

    First removes the folders of dead owners. `data` is written to the owner file, so that people can see which system
    uses the memory.
    """
    if not os.access(root, os.W_OK):
        yield None
        return
    for folder in root.glob(f"{_PREFIX}*"):
        _reclaim(folder)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    # Locked before it gets its name, so that no other `up` takes the owner for dead.
    draft = folder / f".{_OWNER}"
    lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        draft.write_text(str(data or ""))
        draft.rename(folder / _OWNER)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _reclaim(folder: Path) -> None:
    """Removes a folder whose owner is dead. A folder of another user, or one that is being made, stays."""
    try:
        status = folder.lstat()
        if status.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
            return
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            if time.time() - folder.lstat().st_mtime > OWNERLESS_FOLDER_S:
                shutil.rmtree(folder, ignore_errors=True)
        return
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
