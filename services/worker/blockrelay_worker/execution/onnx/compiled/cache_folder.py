"""A folder of files that can be made anew at any time, by keys: of one user, bounded, and believed only when whole.

Whatever is wrong with it (it cannot be written, the disk is full, a file is cut short, altered, or somebody else's)
costs time alone: `get` finds nothing, `put` keeps nothing, and the log says why.
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

#: Files together: a graph has a fifth of a megabyte for 32 layers.
MOST_BYTES = 256 << 20
#: A file of this age that was never finished is nobody's any more. Seconds.
_UNFINISHED_S = 3600.0
_MAGIC = b"blockrelay cache 1\n"
_DIGEST = hashlib.sha256().digest_size
_HEAD = len(_MAGIC) + 2 * _DIGEST
#: Not everywhere: links are followed, and ends of lines left alone, where Windows has no such flags.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def default_root(environment: Mapping[str, str], platform: str = sys.platform) -> Path | None:
    """Where this platform keeps caches of a user's programs; None where nobody says who the user is."""
    home = environment.get("USERPROFILE" if platform == "win32" else "HOME")
    if platform == "win32":
        local = environment.get("LOCALAPPDATA") or (home and f"{home}/AppData/Local")
        return Path(local, "blockrelay", "cache") if local else None
    if platform == "darwin":
        return Path(home, "Library", "Caches", "blockrelay") if home else None
    caches = environment.get("XDG_CACHE_HOME") or ""
    if os.path.isabs(caches):  # others are to be ignored, says the specification
        return Path(caches, "blockrelay")
    return Path(home, ".cache", "blockrelay") if home else None


def private_folder(path: Path) -> Path | None:
    """`path` as a folder that nobody else can write to, made where it is missing (0700); None, and a line in the log,
    where there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode):
            return _unusable(path, "it is no folder")
        if not _ours(found):
            return _unusable(path, "others own it or can write to it")
    except OSError as error:
        return _unusable(path, error.strerror or str(error))
    return path


class CacheFolder:
    """Of several processes at once: files appear whole or not at all."""

    def __init__(self, root: Path, *, most_bytes: int = MOST_BYTES) -> None:
        """`root` as `private_folder` gives it."""
        self.root, self._most_bytes = root, most_bytes

    def get(self, key: str) -> bytes | None:
        """What was put, or None. A file that is not that goes."""
        try:
            with os.fdopen(os.open(self._path(key), os.O_RDONLY | _FLAGS), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or not _ours(found) or found.st_size > self._most_bytes:
                    return self._disbelieved(key, "it is no file of ours")
                whole = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._disbelieved(key, error.strerror or str(error))
        content = whole[_HEAD:]
        if whole[:_HEAD] != _head(key, content):
            return self._disbelieved(key, "it is not what was written")
        with contextlib.suppress(OSError):
            os.utime(self._path(key))  # the oldest go first
        return content

    def put(self, key: str, content: bytes) -> None:
        """Keep it, as far as there is room: what was used longest ago goes for it."""
        if _HEAD + len(content) > self._most_bytes:
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
        """Forget it."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """The name of a file to be, on the same disk; what is there behind it goes."""
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
        """The oldest files go until the rest is small enough, and what a process that died has left unfinished."""
        files: list[tuple[float, int, str]] = []
        for entry in os.scandir(self.root):
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                found = entry.stat(follow_symlinks=False)
                if not entry.name.startswith("."):
                    files.append((found.st_mtime, found.st_size, entry.path))
                elif time.time() - found.st_mtime > _UNFINISHED_S:
                    os.unlink(entry.path)
        kept = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if kept <= self._most_bytes:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            kept -= size


def _head(key: str, content: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode()).digest() + hashlib.sha256(content).digest()


def _ours(found: os.stat_result) -> bool:
    """Nobody else can have written there. Windows has other rights, which files take from the user's folder."""
    return sys.platform == "win32" or (found.st_uid == os.geteuid() and not found.st_mode & 0o022)


def _unusable(path: Path, reason: str) -> None:
    log().warning("CACHE_UNUSABLE", path=str(path), reason=reason)
