"""Starts a real system, and sends it a load of `bench.simulate.load`."""

import asyncio
import json
import os
import random
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis

from bench.simulate.load import ClientRequest, Load
from blockrelay.block_folder.folder import open_block_folder
from blockrelay_launcher.background import started_up
from blockrelay_launcher.drill.system import children_of, command_line

_TOKENS = re.compile(rb'"token_ids":\[(\d[^\]]*)\]')
#: Seconds that running requests may take to end.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class System:
    """A running `blockrelay up`."""

    url: str
    """The address of its gateway."""
    model: str
    """The model's key in Redis."""
    pids: dict[str, list[int]]
    """Its processes, by kind."""
    redis: "redis.Redis"
    """A client for its control Redis."""

    def cpu_s(self) -> dict[str, float]:
        """Returns the seconds of CPU of each kind of process so far.

        Workers are two kinds: `engine` is the thread that computes, and `beside` are their other threads.
        """
        spent: dict[str, float] = defaultdict(float)
        for kind, pids in self.pids.items():
            for pid in pids:
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    seconds = int((thread / "schedstat").read_text().split()[0]) / 1e9
                    part = "engine" if thread.name == str(pid) else "beside"
                    spent[part if kind == "worker" else kind] += seconds
        return dict(spent)

    def core_waits(self) -> tuple[float, float]:
        """Returns the seconds that threads have waited for a core so far, and how often they got one."""
        waited, turns = 0.0, 0
        for pid in (pid for pids in self.pids.values() for pid in pids):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                _, nanoseconds, times = map(int, (thread / "schedstat").read_text().split())
                waited, turns = waited + nanoseconds / 1e9, turns + times
        return waited, turns

    def resident_bytes(self, kind: str) -> int:
        """Returns the bytes of resident memory of all processes of a kind, one of the keys of `pids`."""
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids[kind]]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(model: Path, *, stages: int = 1, replicas: int = 1) -> Iterator[System]:
    """Runs `blockrelay up` with workers of one thread each, without speculation; yields when it is ready.

    The model is cut into `stages` stages, each with `replicas` workers. Raises ServiceUnavailable if `up` ends before.
    """
    with tempfile.TemporaryDirectory(prefix="br-simulate-") as folder:
        options = ["--model", str(model), "--port", "0", "--data", folder, "--threads", "1", "--no-speculation"]
        options += ["--stages", str(stages), "--replicas", str(replicas)]
        with started_up(*options, apart=False, log=Path(folder) / "up.log") as up:
            control = redis.Redis(unix_socket_path=f"{folder}/control/redis.sock")
            model_key = open_block_folder(model, blocks=[]).model_key
            yield System(up.urls[0], model_key, _children(up.process.pid), control)


def _children(parent: int) -> dict[str, list[int]]:
    """Returns the child processes of `blockrelay up`, by kind."""
    kinds = {
        "blockrelay_worker": "worker", "blockrelay_gateway": "gateway", "blockrelay_scheduler": "scheduler",
        "/control/redis.sock": "control Redis", "/payload/redis.sock": "payload Redis",
    }  # fmt: skip
    children: dict[str, list[int]] = defaultdict(list)
    for pid in children_of(parent):
        command = command_line(pid)
        for word, kind in kinds.items():
            if word in command:
                children[kind].append(pid)
    return dict(children)


@dataclass(slots=True, kw_only=True)
class Driver:
    """Sends a load to a gateway, with random token ids as prompts."""

    url: str
    load: Load
    vocabulary: int
    """The number of token ids of the model."""
    chance: random.Random
    requests: list[ClientRequest]
    """All requests that it has sent, with times of `time.monotonic`."""
    received_bytes: int = 0

    async def run(self, until: float) -> None:
        """Begins requests up to `until` (monotonic seconds), and returns when all are answered.

        Raises TimeoutError PATIENCE_S after `until`, and RuntimeError for an answer with too few tokens.
        """
        async with asyncio.timeout(until - time.monotonic() + PATIENCE_S), asyncio.TaskGroup() as tasks:
            for _ in range(self.load.clients):
                tasks.create_task(self._client(until))
            began = time.monotonic()
            for moment in self.load.arrivals(self.chance, until - began):
                await asyncio.sleep(began + moment - time.monotonic())
                tasks.create_task(self._ask())

    async def _client(self, until: float) -> None:
        await self._ask()
        while time.monotonic() < until:
            await self._ask()

    async def _ask(self) -> None:
        """Sends one request and reads its answer."""
        parts = urlsplit(self.url)
        request = ClientRequest(self.load.prompt.draw(self.chance), self.load.new.draw(self.chance), time.monotonic())
        self.requests.append(request)
        prompt = self.chance.choices(range(3, self.vocabulary), k=request.prompt)
        fields = {"prompt": prompt, "max_tokens": request.new, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps({**fields, "return_token_ids": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
        answer = _Answer(request, self)
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: answer, parts.hostname or "", parts.port or 80
        )
        transport.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        try:
            await answer.ended
        finally:
            transport.abort()
        if len(request.tokens) != request.new:
            raise RuntimeError(f"an answer ended after {len(request.tokens)} of {request.new} tokens: {answer.rest!r}")


class _Answer(asyncio.Protocol):
    """Receives one streamed answer, in as few instructions as possible: it shares the cores with what it measures."""

    def __init__(self, request: ClientRequest, driver: Driver) -> None:
        self._request, self._driver = request, driver
        self.ended = asyncio.get_running_loop().create_future()
        self.rest = b""

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._driver.received_bytes += len(data)
        events, _, self.rest = (self.rest + data).rpartition(b"\n\n")
        for found in _TOKENS.finditer(events):
            self._request.tokens.extend([now] * (1 + found.group(1).count(b",")))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def wire_bytes(control: "redis.Redis") -> float:
    """Returns the bytes that a Redis has received and sent so far."""
    stats: dict[str, Any] = control.info("stats")  # pyright: ignore[reportAssignmentType]
    return stats["total_net_input_bytes"] + stats["total_net_output_bytes"]
