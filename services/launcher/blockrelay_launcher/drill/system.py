"""The system that a drill hurts: `blockrelay up` as a process of its own, and who in it plays which role."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import redis

from blockrelay import redis_link
from blockrelay.errors import ServiceUnavailable
from blockrelay.keys import Keys
from blockrelay_launcher.data_folder import Running, read_running
from blockrelay_launcher.processes import die_with_parent

#: Workers learn of the last ends within a beat or two. Seconds.
SETTLE_S = 5.0

Role = Literal["worker", "scheduler", "gateway", "redis"]
ROLES: tuple[Role, ...] = ("worker", "scheduler", "gateway", "redis")
_IN_COMMAND = {
    "worker": "-m blockrelay_worker",
    "scheduler": "-m blockrelay_scheduler",
    "gateway": "-m blockrelay_gateway",
    "redis": "/redis.sock",
}


@dataclass(frozen=True, slots=True)
class DrilledSystem:
    """A running `up` on the folder `data`."""

    process: "subprocess.Popen[str]"
    data: Path
    running: Running

    @property
    def urls(self) -> list[str]:
        return self.running.urls

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    def pids(self, role: Role) -> list[int]:
        """Living processes of a role, lowest pid first."""
        folder = Path("/proc") / str(self.process.pid) / "task" / str(self.process.pid)
        found = [int(pid) for pid in (folder / "children").read_text().split()]
        return sorted(pid for pid in found if _IN_COMMAND[role] in _command_line(pid))

    def requests_on(self, pid: int) -> frozenset[str] | None:
        """Requests whose route has the worker `pid`; None when Redis does not answer."""
        keys = Keys(self.running.cell)
        client = redis_link.connect(self.running.redis_url)
        try:
            workers: list[bytes] = client.zrange(keys.workers, 0, -1)  # pyright: ignore
            mine = [name.decode() for name in workers if name.split(b":")[1:2] == [str(pid).encode()]]
            members: list[bytes] = [m for name in mine for m in client.smembers(keys.on(name))]  # pyright: ignore
            return frozenset(member.decode() for member in members)
        except redis_link.UNREACHABLE:
            return None
        finally:
            client.close()

    def left_behind(self) -> list[str]:
        """What Redis still holds although every request has ended; nothing when the books are right.

        Waits some seconds for it to vanish. Empty too when Redis does not answer.
        """
        client = redis_link.connect(self.running.redis_url)
        end = time.monotonic() + SETTLE_S
        try:
            while (found := _held(client, Keys(self.running.cell))) and time.monotonic() < end:
                time.sleep(0.1)
            return found
        except redis_link.UNREACHABLE:
            return []
        finally:
            client.close()


def _held(client: redis.Redis, keys: Keys) -> list[str]:
    """Queue entries, memberships, reservations and sums that are not empty, by key."""
    found: list[str] = []
    for raw in cast(Any, client.scan_iter(f"{keys.running.removesuffix('running')}*", count=1000)):
        name = raw.decode()
        part = name.split(":")[1]
        if part in ("running", "delayed", "queue", "due"):
            held = client.zcard(name)
        elif part in ("on", "of"):
            held = client.scard(name)
        elif part == "reruns":
            held = client.xlen(name)
        elif part == "worker":
            held = int(cast(Any, client.hget(name, "reserved")) or 0)
        elif part == "load":
            held = sum(int(value) != 0 for value in cast(Any, client.hvals(name)))
        else:
            continue
        if held:
            found.append(f"{name} holds {held}")
    return sorted(found)


def _command_line(pid: int) -> str:
    """Empty for a process that has ended, a zombie included."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@contextlib.contextmanager
def drilled_system(model: Path, data: Path, options: Sequence[str]) -> Iterator[DrilledSystem]:
    """`up` with these options, ready; ended (and with it everything it started) in every case.

    Raises ServiceUnavailable when it does not become ready.
    """
    argv = [sys.executable, "-P", "-m", "blockrelay_launcher", "up", "--model", str(model), "--data", str(data)]
    with (data / "up.log").open("ab") as log:
        process = subprocess.Popen(
            [*argv, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the drill alone
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
    with process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("ready "):
                code = process.wait()
                last = (data / "up.log").read_text().strip().splitlines()[-1:]
                raise ServiceUnavailable(f"`blockrelay up` ended with code {code} before it was ready: {last}")
            yield DrilledSystem(process, data, read_running(data))
        finally:
            if process.poll() is None:
                for pid in _children(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)  # what is stopped cannot end
                process.send_signal(signal.SIGTERM)
            process.wait()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
