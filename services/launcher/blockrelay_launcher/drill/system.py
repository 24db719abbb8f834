"""The system that a drill hurts: `blockrelay up` in a process of its own, and the roles of its processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import httpx
import redis

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import RedisTrouble, ServiceUnavailable, UsageError
from blockrelay.protocol.encoding.request_ids import parse_id
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.plan import GPU, Device, WorkerInfo
from blockrelay.protocol.records.ended import Log, body_of
from blockrelay.redis import client as redis_link
from blockrelay.redis.errors import CommandError
from blockrelay.redis.registry import read_workers, worker_ids
from blockrelay.up_file import Running, read_running
from blockrelay_launcher.background import started_up
from blockrelay_launcher.client.resuming import Refused
from blockrelay_launcher.drill.faults import Target
from blockrelay_launcher.supervisor.ports import kept_ports

#: Address of the gateways of a drill.
HOST = "127.0.0.1"
#: Seconds to wait for Redis to be empty: workers learn of the last ends within one or two heartbeats.
SETTLE_S = 5.0
#: Seconds that GPU workers may take to load: a driver that compiles its shaders for the first time takes a minute.
GPUS_LOAD_S = 240.0
#: Seconds after which the drill treats a silent Redis as stopped and goes on.
ANSWER_S = 0.5


def add_setting(data: Path, name: str, setting: str) -> None:
    """Adds a setting NAME=VALUE to those that `up` on the folder `data` gives a service at its next start."""
    path = data / "settings" / name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.touch(mode=0o600)
    draft.write_text((path.read_text() if path.exists() else "") + setting + "\n")
    draft.replace(path)


@dataclass(frozen=True, slots=True)
class DrilledSystem:
    """A running `blockrelay up` on the folder `data`."""

    process: "subprocess.Popen[str]"
    data: Path
    running: Running

    @property
    def logs(self) -> Path:
        """Folder of the services' log files."""
        return self.data / "logs"

    def pids(self, target: Target) -> list[int]:
        """Returns the pids of the living processes of a role, the lowest first."""
        if target == "device":
            return sorted(child for worker in self.pids("worker") for child in children_of(worker))
        url = self.redis_urls.get(target, "")
        what = unquote(url.removeprefix("unix://")) if url else f"-m blockrelay_{target}"
        return sorted(pid for pid in children_of(self.process.pid) if what in command_line(pid))

    @property
    def redis_urls(self) -> dict[Target, str]:
        """URLs (unix sockets) of the two Redis servers that `up` has started."""
        assert self.running.payload_redis_url is not None
        return {"redis-control": self.running.redis_url, "redis-payload": self.running.payload_redis_url}

    def process_of(self, name: str) -> tuple[int, dict[str, str]] | None:
        """Returns the pid and the environment of a service by the name that `up` gave it; None if it is dead now."""
        for pid in children_of(self.process.pid):
            environment = environment_of(pid)
            if environment.get("BLOCKRELAY_NODE_ID") == name and "-m blockrelay_" in command_line(pid):
                return pid, environment
        return None

    def set_for_next_start(self, name: str, setting: str) -> None:
        """Adds a setting NAME=VALUE to the environment that a service gets at its next start."""
        add_setting(self.data, name, setting)

    def administrator(self, server: Target) -> redis.Redis:
        """Returns a client with all rights of `server`, redis-control or redis-payload.

        It waits at most ANSWER_S for an answer, and then raises RedisTrouble.
        """
        return redis_link.connect(self.redis_urls[server], cell=self.running.cell, answer_s=ANSWER_S)

    def worker_of(self, device: int) -> int | None:
        """Returns the pid of the worker whose child is the process `device` of a GPU; None if one of them has ended."""
        return next((worker for worker in self.pids("worker") if device in children_of(worker)), None)

    def requests_on(self, pid: int) -> frozenset[str] | None:
        """Returns the ids (inside the cell) of the requests on the workers of process `pid`.

        None: Redis does not answer.
        """
        keys = Keys(self.running.cell)
        with contextlib.suppress(RedisTrouble, CommandError), self.administrator("redis-control") as client:
            mine = [name for name in worker_ids(client, keys) if name.split(":")[1:2] == [str(pid)]]
            members: list[bytes] = [m for name in mine for m in client.smembers(keys.worker_requests(name))]  # pyright: ignore
            return frozenset(member.decode() for member in members)
        return None

    def record_of(self, path: str, body: Mapping[str, Any]) -> RequestBody:
        """Sends a request with this JSON body to `path`, and returns what a gateway wrote into its record.

        It runs in the background, and is cancelled as soon as the record was read. Raises Refused if a gateway refuses
        the request or ignores a field of it, WireError for a record that cannot be read, RedisTrouble, and
        ServiceUnavailable if the gateway does not answer.
        """
        url = self.running.urls[0]
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
            try:
                answer = http.post(path, json={**body, "background": True})
            except httpx.TransportError as error:
                raise ServiceUnavailable(f"the gateway at {url} does not answer: {error!r}") from error
            if not answer.is_success:
                raise Refused(answer.status_code, answer.text[:300])
            name: str = answer.json()["id"]
            parsed = parse_id(name)
            assert parsed is not None, "gateways give ids of requests"
            keys = Keys(parsed.cell or self.running.cell)
            with redis_link.connect(self.running.redis_url, cell=keys.cell) as client:
                both = client.pipeline(transaction=True)
                both.hgetall(keys.request(parsed.request_id))
                both.xrange(keys.log(parsed.request_id))
                record, log = cast(tuple[dict[bytes, bytes], Log], both.execute())
            http.delete(f"/v1/requests/{name}")
            if ignored := answer.headers.get("x-blockrelay-ignored"):
                raise Refused(answer.status_code, f"ignored: {ignored}")
        return body_of(record, log)

    def other_numerics(self) -> set[str]:
        """Returns the numerics ids that workers would have with block folders which they do not serve now."""
        return {one.numerics for worker in self._workers() for one in worker.folders if one.key != worker.folder}

    def numerics_ids(self, of: Device) -> set[str]:
        """Returns the numerics ids of the workers on devices of class `of`. Raises RedisTrouble if Redis is silent."""
        return {worker.numerics for worker in self._workers() if worker.device == of}

    def wait_for_gpus(self, count: int) -> None:
        """Returns when `count` GPU workers serve a stage.

        Raises ServiceUnavailable after GPUS_LOAD_S, and at once (as RedisTrouble) if Redis is silent.
        """
        end = time.monotonic() + GPUS_LOAD_S
        while time.monotonic() < end:
            if sum(worker.ready for worker in self._workers() if worker.device == GPU) >= count:
                return
            time.sleep(0.1)
        raise ServiceUnavailable(f"after {GPUS_LOAD_S:.0f} s not all of {count} GPUs serve: see {self.logs}")

    def _workers(self) -> list[WorkerInfo]:
        """Returns all registered workers."""
        model_key = open_block_folder(Path(self.running.model), blocks=[]).model_key
        with self.administrator("redis-control") as client:
            return read_workers(client, Keys(self.running.cell), model_key)

    def denied(self) -> list[str]:
        """Returns a line for each command or key that a Redis server has denied a user, as its ACL log has them.

        A server begins this log empty at each start and limits its length. One that does not answer gives no line.
        """
        denials: set[str] = set()
        for server in self.redis_urls:
            with contextlib.suppress(RedisTrouble, CommandError), self.administrator(server) as client:
                for one in cast(Any, client.acl_log()):
                    denials.add(f"{server} denied {one['username']} {one['reason']} {one['object']}")
        return sorted(denials)

    def left_behind(self) -> list[str]:
        """Returns a line for each key that Redis still holds although every request has ended.

        The list is empty if the accounting is right, and also if Redis does not answer. Waits up to SETTLE_S for keys
        to vanish.
        """
        end = time.monotonic() + SETTLE_S
        with redis_link.connect(self.running.redis_url, cell=self.running.cell) as client:
            try:
                while (held := _held(client, Keys(self.running.cell))) and time.monotonic() < end:
                    time.sleep(0.1)
                return held
            except RedisTrouble:
                return []


#: Reads how much a key holds that must be empty after all requests, by the first part of the key's name: queues,
#: memberships, reservations and sums.
_HELD: Mapping[str, Callable[[Any, str], int]] = {
    **dict.fromkeys(("running", "delayed", "queue", "due"), redis.Redis.zcard),
    **dict.fromkeys(("worker-requests", "tenant-requests"), redis.Redis.scard),
    **dict.fromkeys(("reruns", "pinned"), redis.Redis.xlen),
    "worker": lambda client, name: int(client.hget(name, "pages_reserved") or 0),
    "outstanding": lambda client, name: sum(int(value) != 0 for value in client.hvals(name)),
}


def _held(client: redis.Redis, keys: Keys) -> list[str]:
    """Returns a line for each key that is not empty and should be (`_HELD`)."""
    names = [raw.decode() for raw in cast(Any, client.scan_iter(keys.all, count=1000))]
    sizes = {name: read(client, name) for name in names if (read := _HELD.get(name.split(":")[1]))}
    return sorted(f"left behind: {name} holds {size}" for name, size in sizes.items() if size)


def command_line(pid: int) -> str:
    """Returns the command line of a process; empty for one that has ended, a zombie included."""
    return " ".join(_strings(pid, "cmdline"))


def environment_of(pid: int) -> dict[str, str]:
    """Returns the environment of a process at its start; empty for one that has ended.

    It also has an entry with an empty name and value, which must not be given to a new process. A zombie has only this.
    """
    return {name: value for name, _, value in (pair.partition("=") for pair in _strings(pid, "environ"))}


def _strings(pid: int, file: str) -> list[str]:
    """Returns the strings in a file of a process in /proc; none if it has ended."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/{file}").read_bytes()).split("\0")
    except OSError:
        return []


@contextlib.contextmanager
def drilled_system(
    data: Path,
    options: Sequence[str],
    *,
    python: str = sys.executable,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[DrilledSystem]:
    """Runs `blockrelay up` with these options, yields it when it is ready, and ends it and all its processes.

    `python` is the interpreter of the release to run; `port` is the first gateway's (0: free ones); `environment` is
    added to that of this process. Raises ServiceUnavailable if the system does not become ready.
    """
    up = ["--data", str(data), "--port", str(port), *options]
    with started_up(*up, apart=True, python=python, log=data / "up.log", environment=environment) as (process, _):
        try:
            yield DrilledSystem(process, data, read_running(data))
        finally:
            if process.poll() is None:
                for pid in children_of(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)  # a stopped process cannot end


def check_release(python: str) -> None:
    """Raises UsageError unless `python` can run a release of Blockrelay."""
    try:
        subprocess.run([python, "-P", "-c", "import blockrelay_launcher"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"--upgrade-from {python!r} is not the Python of a release of Blockrelay") from error


@contextlib.contextmanager
def lasting_ports(count: int) -> Iterator[int]:
    """Yields the first of `count` consecutive free ports, and keeps them for an `up` while one ends and another starts.

    Without this, a client that connects to a port without a listener may get the same port as its own. It is then
    connected to itself, and blocks the gateway that comes back.
    """
    with contextlib.ExitStack() as kept:
        first = 0
        while not first:
            with kept_ports(HOST, 0, 1) as (candidate,):
                pass
            with contextlib.suppress(UsageError):
                first = kept.enter_context(kept_ports(HOST, candidate, count))[0]
        yield first


def children_of(pid: int) -> list[int]:
    """Returns the child processes of all threads of a process, sorted."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                children += map(int, (thread / "children").read_text().split())
    return sorted(children)
