"""The folder in memory through which the workers of one `up` share KV pages.

ROOT/blockrelay-<random>/          pages, and
ROOT/blockrelay-<random>/owner     locked for as long as its `up` runs; says where that keeps its data

The lock ends with the process, however that ends: whoever starts next removes what no living process owns.
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

SHARED_MEMORY = Path("/dev/shm")
#: Share of the free memory, and of the free room on the file system, that pages may fill.
MEMORY_SHARE, ROOM_SHARE = 1 / 8, 1 / 2
_PREFIX = "blockrelay-"
_OWNER = "owner"
#: A folder without an owner file may still be on its way to one for so long. Seconds.
_YOUNG_S = 60.0


def default_limit(root: Path = SHARED_MEMORY) -> int:
    """Bytes of pages that this machine can spare; 0 where there is no folder in memory."""
    try:
        room = shutil.disk_usage(root).free
    except OSError:
        return 0
    return int(min(available_bytes() * MEMORY_SHARE, room * ROOM_SHARE))


@contextlib.contextmanager
def open_page_folder(root: Path = SHARED_MEMORY, *, data: Path | None = None) -> Iterator[Path | None]:
    """A new empty folder, removed at the end; None where none can be made. Removes the folders of dead owners first.

    `data`: what the owner file says, so that people find out whose memory that is.
    """
    if not os.access(root, os.W_OK):
        yield None
        return
    for folder in root.glob(f"{_PREFIX}*"):
        _reclaim(folder)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    # Locked before it has its name, so that nobody takes it for a dead owner's.
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
    """Remove a folder whose owner is dead. Somebody else's, or one that just begins, stays."""
    try:
        status = folder.lstat()
        if status.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
            return
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            if time.time() - folder.lstat().st_mtime > _YOUNG_S:
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
