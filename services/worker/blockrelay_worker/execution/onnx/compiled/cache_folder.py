"""A folder of cached files by key. It belongs to one user, is bounded, and a file is used only if it is whole.

Whatever is wrong with it (not writable, disk full, a file cut short, altered or of another user) only costs time: `get`
finds nothing, `put` keeps nothing, and the log says why.
"""

import contextlib
import hashlib
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from blockrelay.observability.logs import get as log
from blockrelay_worker.policy import GRAPH_CACHE_BYTES

#: Seconds after which an unfinished file is deleted: its process has died.
_UNFINISHED_S = 3600.0
_MAGIC = b"blockrelay cache 1\n"
_DIGEST = hashlib.sha256().digest_size
_HEAD = len(_MAGIC) + 2 * _DIGEST
#: Flags that some systems lack. Windows has no O_NOFOLLOW, others have no O_BINARY.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def default_root(environment: Mapping[str, str], platform: str = sys.platform) -> Path | None:
    """Returns the folder in which this platform keeps a user's caches; None if the environment does not name the
    user."""
    home = environment.get("USERPROFILE" if platform == "win32" else "HOME")
    if platform == "win32":
        local = environment.get("LOCALAPPDATA") or (home and f"{home}/AppData/Local")
        return Path(local, "blockrelay", "cache") if local else None
    if platform == "darwin":
        return Path(home, "Library", "Caches", "blockrelay") if home else None
    caches = environment.get("XDG_CACHE_HOME") or ""
    if os.path.isabs(caches):  # the XDG specification says that relative paths are ignored
        return Path(caches, "blockrelay")
    return Path(home, ".cache", "blockrelay") if home else None


def private_folder(path: Path) -> Path | None:
    """Returns `path` as a folder that no other user can write to, made if missing (0700). None, and a line in the log,
    if it cannot be one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            return _unusable(path, "it is no folder")
        if not _ours(status):
            return _unusable(path, "others own it or can write to it")
    except OSError as error:
        return _unusable(path, error.strerror or str(error))
    return path


class CacheFolder:
    """A cache folder. Several processes may use it at once: files appear whole or not at all."""

    def __init__(self, root: Path, *, max_bytes: int = GRAPH_CACHE_BYTES) -> None:
        """`root`: a folder that `private_folder` returned."""
        self.root, self._max_bytes = root, max_bytes

    def get(self, key: str) -> bytes | None:
        """Returns what was put under `key`, or None. A file that is damaged, too large, unreadable or writable by
        others is deleted."""
        try:
            with os.fdopen(os.open(self._path(key), os.O_RDONLY | _FLAGS), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or not _ours(status) or status.st_size > self._max_bytes:
                    return self._disbelieved(key, "it is not a file of this user, or too large")
                whole = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._disbelieved(key, error.strerror or str(error))
        content = whole[_HEAD:]
        if whole[:_HEAD] != _head(key, content):
            return self._disbelieved(key, "it is not what was written")
        with contextlib.suppress(OSError):
            os.utime(self._path(key))  # files with the oldest times are deleted first
        return content

    def put(self, key: str, content: bytes) -> None:
        """Keeps `content` under `key`. Files that were used longest ago are deleted for it. Raises nothing if it
        cannot. Content that exceeds the folder's limit is not kept, without a log line."""
        if _HEAD + len(content) > self._max_bytes:
            return
        try:
            with self.scratch() as path:
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600), "wb") as file:
                    file.write(_head(key, content))
                    file.write(content)
                os.replace(path, self._path(key))
            self._trim()
        except OSError as error:
            log().warning("CACHE_NOT_WRITTEN", path=str(self.root), reason=error.strerror or str(error))

    def drop(self, key: str) -> None:
        """Deletes the file of `key`, if there is one."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Context with the path of a file to be written, on the same disk. What is left there at the end is deleted."""
        path = self.root / f".{os.getpid()}-{secrets.token_hex(8)}"
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def _path(self, key: str) -> Path:
        return self.root / hashlib.sha256(key.encode()).hexdigest()

    def _disbelieved(self, key: str, reason: str) -> None:
        log().warning("CACHE_NOT_BELIEVED", path=str(self._path(key)), reason=reason)
        self.drop(key)

    def _trim(self) -> None:
        """Deletes the oldest files until the rest is small enough, and unfinished files of processes that died."""
        files: list[tuple[float, int, str]] = []
        for entry in os.scandir(self.root):
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                status = entry.stat(follow_symlinks=False)
                if not entry.name.startswith("."):
                    files.append((status.st_mtime, status.st_size, entry.path))
                elif time.time() - status.st_mtime > _UNFINISHED_S:
                    os.unlink(entry.path)
        kept = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if kept <= self._max_bytes:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            kept -= size


def _head(key: str, content: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode()).digest() + hashlib.sha256(content).digest()


def _ours(status: os.stat_result) -> bool:
    """Returns whether no other user can have written the file. On Windows always true: files take the rights of the
    user's folder."""
    return sys.platform == "win32" or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)


def _unusable(path: Path, reason: str) -> None:
    """Logs why the folder is not used."""
    log().warning("CACHE_UNUSABLE", path=str(path), reason=reason)
