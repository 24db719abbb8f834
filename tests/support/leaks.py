"""What a test must not leave behind: processes, folders, Redis keys that nothing living owns.

Each pytest process has a temporary folder of its own, so that what other people do on this machine does not matter.
"""

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import redis

from blockrelay.protocol.keys import FAMILIES

SHARED_MEMORY = Path("/dev/shm")
#: Seconds after a test in which what it ended may still be on its way out. Nothing waits for them where all is well.
SETTLE_S = 15.0
#: Families of keys that stay for as long as the cell does, or vanish with their last member.
STRUCTURES = {f.name for f in FAMILIES if f.gone.split()[0] in ("never", "member:", "entry:", "when", "trimmed")}
#: Of a request that is not finished; of a worker in the registry. Without a time to live they die with them.
REQUESTS, WORKERS = {"request", "log"}, {"worker", "worker-requests", "quarantine", "inbox"}
#: Sets and streams of requests that are not finished.
MEMBERS = {"queue": "zset", "due": "zset", "delayed": "zset", "tenant-requests": "set"}


class Spawned:
    """The processes that were there before a test, and whether it has started any: a look at all costs milliseconds.

    No audit hook: with one, two threads that begin under a trace function (coverage) can meet in `sys.settrace`, which
    refuses the second ("Cannot install a trace function while another trace function is being installed").
    """

    def __init__(self) -> None:
        self._any, self._before = False, frozenset[int]()
        start = subprocess.Popen.__init__

        def heard(popen: subprocess.Popen[Any], *arguments: Any, **options: Any) -> None:
            self._hear()
            start(popen, *arguments, **options)

        setattr(subprocess.Popen, "__init__", heard)  # noqa: B010  # a method cannot be assigned
        os.register_at_fork(before=self._hear)

    def _hear(self) -> None:
        self._any = True

    def begin(self) -> None:
        """What runs now may stay: fixtures of the module and the session have started it."""
        if self._any:
            self._any, self._before = False, frozenset(processes())

    def left(self) -> dict[int, str]:
        """pid -> command line of what was started since and still runs."""
        return {p: command for p, command in processes().items() if p not in self._before} if self._any else {}


def settled(look: Callable[[], Collection[object]]) -> Collection[object]:
    """What `look` still finds when it has had time to vanish: a process that was told to end takes a moment."""
    end = time.monotonic() + SETTLE_S
    while (found := look()) and time.monotonic() < end:
        threading.Event().wait(0.02)
    return found


def processes() -> dict[int, str]:
    """pid -> command line of every process that has our temporary folder, and so descends from this one."""
    mine = f"TMPDIR={tempfile.gettempdir()}".encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it has just ended, or is somebody else's
        if mine in environment and command and "multiprocessing.resource_tracker" not in command:
            found[int(entry.name)] = command
    return found


def folders(homes: tuple[Path, ...]) -> set[str]:
    """What lies in our temporary folder, and the page folders of every `up` whose data lie below one of `homes`."""
    found = {entry.path for entry in os.scandir(tempfile.gettempdir()) if not _is_probe(entry)}
    for owner in SHARED_MEMORY.glob("blockrelay-*/owner"):
        try:
            data = Path(owner.read_text())
        except OSError:
            continue
        if any(data.is_relative_to(home) for home in homes):
            found.add(str(owner.parent))
    return found


def _is_probe(entry: "os.DirEntry[str]") -> bool:
    """Whether this is the file of a few bytes with which Python's tempfile finds out whether it may write.

    It has a name of eight letters and is there for a moment; a process that is killed just then leaves it.
    """
    try:
        return len(entry.name) == 8 and entry.is_file() and entry.stat().st_size <= len(b"blat")
    except FileNotFoundError:
        return True


def ownerless_keys(client: redis.Redis) -> list[str]:
    """Keys without a time to live that belong to nothing that lives, and members of queues that have ended.

    Every key must be of the table in `blockrelay.protocol.keys`; keys of no cell are the test's own business.
    """
    names = [raw.decode(errors="replace") for raw in cast("list[bytes]", client.keys("{*}:*"))]
    found: list[str] = []
    for cell in {name.partition(":")[0] for name in names}:
        running = _members(client, f"{cell}:running", "zset")
        workers = _members(client, f"{cell}:workers", "zset")
        control = any(name.startswith((f"{cell}:worker", f"{cell}:plan", f"{cell}:request")) for name in names)
        for name in names:
            start, family, *rest = name.split(":", 2)
            if start != cell or client.pttl(name) != -1:
                continue
            what = rest[0] if rest else ""
            if (family in REQUESTS and what in running) or (family in WORKERS and what in workers):
                continue
            if family == "inbox" and not control:
                continue  # a payload Redis: whose it is says the other one
            if family not in STRUCTURES:
                found.append(f"{name} has no time to live, and nothing that lives owns it")
            elif family in MEMBERS and (ended := _members(client, name, MEMBERS[family]) - running):
                found.append(f"{name} holds {sorted(ended)}, which are not running")
            elif family == "outstanding" and not running and (sums := _sums(client, name)):
                found.append(f"{name} holds {sums}, and nothing runs")
    return sorted(found)


def _members(client: redis.Redis, name: str, kind: str) -> set[str]:
    raw = client.smembers(name) if kind == "set" else client.zrange(name, 0, -1)
    return {member.decode(errors="replace") for member in cast(Any, raw)}


def _sums(client: redis.Redis, name: str) -> dict[str, int]:
    raw = cast("dict[bytes, bytes]", client.hgetall(name))
    return {field.decode(): int(value) for field, value in raw.items() if int(value)}
