"""A gateway in a thread, a real Redis, and workers that the test plays by calling the real scripts."""

import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import redis
import uvicorn
from fastapi import FastAPI

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.encoding.request_ids import public_id
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Claimed, Commit, EndReason, TokenLogprobs
from blockrelay.protocol.plan import Plan
from blockrelay.protocol.tensors import encode_result
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import Scripts
from blockrelay.redis.protocol_check import check_protocol
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.__main__ import GatewayServer, look_at_redis, tcp_socket
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.app import create_app
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.http.server import server_config
from tests.support.beside import beside
from tests.support.gateway.documented import Documented
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.support.worker.registering import announce

NUMERICS = "numerics-of-the-test"
SPLIT = "1-1,2-2"


@dataclass(kw_only=True)
class PlayedWorker:
    """Both stages of a route in one object: claims what the gateway queued and commits what the test says."""

    client: redis.Redis
    scripts: Scripts
    keys: Keys
    model: str
    names: tuple[str, ...] = ("w0", "w1")
    split: str = SPLIT
    tokens: list[int] = field(default_factory=list[int])  # what a test may have it say
    positions: dict[str, int] = field(default_factory=dict[str, int])  # by run: tokens that it has said

    def register(self, *, stages: tuple[int, ...] = (0, 1), pages: int = 1000, plan: bool = True) -> "PlayedWorker":
        """Register the workers of these stages and, as the scheduler does, publish the plan that names them, in a cell
        that may be new."""
        if plan:
            check_protocol(self.client, self.keys, join=True)
        for stage in stages:
            name = self.names[stage]
            announce(
                self.client, self.keys, name,
                model=self.model, split=self.split, stage=stage, pages=pages, slots=64, numerics=NUMERICS,
            )  # fmt: skip
        if plan:
            self.give_folder("", replaces_epoch=0, stages=stages)
        return self

    def give_folder(self, folder: str, *, replaces_epoch: int, stages: tuple[int, ...] = (0, 1)) -> None:
        """Publish a plan that names the workers of these stages and this block folder; "": that of the gateway."""
        published = Plan(
            epoch=replaces_epoch,
            split=self.split,
            route_class="cpu",
            assignments={self.names[s]: s for s in stages},
            blocks={"block_1": "CPU", "block_2": "CPU"},
            reasons=("one half", "the other"),
            devices=(("cpu:0",), ()),
            source="a test",
            folder=folder,
        )
        self.scripts.run(
            calls.publish_plan(
                self.model,
                replaces_epoch=replaces_epoch,
                inputs=f"i{folder}",
                route_class="cpu",
                plan=published.to_json(),
            )
        )

    def beat(self, stages: tuple[int, ...] = (0, 1)) -> None:
        seconds, micros = self.client.time()  # pyright: ignore[reportGeneralTypeIssues]
        now = int(seconds) * 1000 + int(micros) // 1000
        self.client.zadd(self.keys.workers, {self.names[stage]: now for stage in stages})

    def claim(self, count: int = 1, stages: tuple[int, ...] = (0, 1)) -> list[Claimed]:
        """Wait for `count` jobs and take them, oldest first."""
        found: list[Claimed] = []

        def enough() -> bool:
            self.beat(stages)
            call = calls.claim(self.names[0], count - len(found), free_pages=1000)
            found.extend(self.scripts.run(call))
            return len(found) >= count

        wait_until(enough, f"{count} jobs are there", poll_s=0.005)
        return found

    def say(
        self,
        claimed: Claimed,
        tokens: list[int],
        *,
        end: EndReason | str = "",
        logprobs: list[TokenLogprobs] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Commit the next tokens of a run."""
        position = self.positions.get(claimed.run_id, len(claimed.tokens))
        item = Commit(
            request_id=claimed.request_id,
            run_id=claimed.run_id,
            position=position,
            tokens=tuple(tokens),
            logprobs=tuple(one.encode() for one in logprobs or ()),
            end=end,  # pyright: ignore[reportArgumentType]
            meta=json.dumps(meta) if meta else "",
        )
        (answer,) = self.scripts.run(calls.commit([item]))
        assert answer.verdict == "OK", answer
        self.positions[claimed.run_id] = position + len(tokens)

    def take(self, tokens: list[int], **how: Any) -> Claimed:
        """Claim a job and say its first tokens."""
        (claimed,) = self.claim()
        self.say(claimed, tokens, **how)
        return claimed

    def finish_tensor(self, claimed: Claimed, logits: "np.ndarray[Any, np.dtype[np.float32]]") -> None:
        """What the last stage does with a tensor step: the result first, then the terminal commit."""
        self.client.set(self.keys.result(claimed.request_id), encode_result(logits), ex=60)
        times = {"block_1": 0.25, "block_2": 0.5}
        self.say(claimed, [], end="tensor", meta={"execution_times": times, "route": list(self.names)})

    def public(self, claimed: Claimed) -> str:
        """What clients call its request."""
        return public_id(claimed.request_id, self.keys.cell)

    def record(self, request_id: str) -> dict[bytes, bytes]:
        return self.client.hgetall(self.keys.request(request_id))  # pyright: ignore[reportReturnType]


@contextmanager
def answering(
    worker: PlayedWorker, reply: Callable[[Claimed], tuple[list[int], str] | None], *, each: bool = True
) -> Iterator[None]:
    """In the background, answer every request with `reply`'s tokens and end: one commit for `each`, or for all. None:
    `reply` has answered it."""

    def loop(over: threading.Event) -> None:
        while not over.is_set():
            worker.beat()
            for claimed in worker.scripts.run(calls.claim(worker.names[0], 8, free_pages=1000)):
                if (answer := reply(claimed)) is None:
                    continue
                tokens, end = answer
                for token in tokens[:-1] if each else ():
                    worker.say(claimed, [token])
                worker.say(claimed, tokens[-1:] if each else tokens, end=end)
            over.wait(0.002)

    with beside(loop):
        yield


@dataclass(kw_only=True)
class RunningGateway:
    """A gateway that listens."""

    url: str
    gateway: Gateway
    http: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, content=json.dumps(body))  # ASCII: httpx cannot send half a surrogate pair

    def metric(self, name: str, **labels: str) -> float:
        everywhere = {"cell": self.cell.name, "model": self.gateway.served.name}
        return self.cell.links.metrics.registry.get_sample_value(name, everywhere | labels) or 0.0

    @property
    def cell(self) -> Cell:
        """The gateway's own."""
        return self.gateway.cells.home


def settings_for(folder: BlockFolder, server: RedisServer, cell: str, **more: Any) -> GatewaySettings:
    """Of a gateway of the model on the server; a client that leaves has its request cancelled soon."""
    return GatewaySettings(model=folder.root, redis_url=server.url, cell=cell, grace_s=0.3, **more)


@contextmanager
def running_gateway(settings: GatewaySettings) -> Iterator[RunningGateway]:
    """Serve `settings` on a free port, in a thread of this process."""
    with serving(create_app(settings)) as running:
        yield running


@dataclass(kw_only=True)
class EndingGateway(RunningGateway):
    """A gateway that can be told to end."""

    server: GatewayServer
    thread: threading.Thread

    def tell(self, number: int) -> None:
        """Send it a signal, which no thread but the main one can get, and wait until it has acted on it."""
        self.server.handle_exit(number, None)
        wait_until(lambda: self.gateway.drain.has_begun, "it has heard the signal")

    @property
    def listens(self) -> bool:
        try:
            socket.create_connection((self.http.base_url.host, self.http.base_url.port or 80)).close()
        except ConnectionRefusedError:
            return False
        return True

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()


@contextmanager
def ending_gateway(settings: GatewaySettings) -> Iterator[EndingGateway]:
    """A gateway like that of `running_gateway`, served as the process serves it; it need not end by itself."""
    app = create_app(settings)
    gateway = app.state.gateway
    server = GatewayServer(server_config(app, settings, gateway.bodies, gateway.drain), gateway)
    with _in_a_thread(server, gateway) as (url, thread), _client(url, app) as http:
        try:
            yield EndingGateway(url=url, gateway=gateway, http=http, server=server, thread=thread)
        finally:
            with suppress(RuntimeError):  # its loop has ended
                for _ in range(2):
                    server.handle_exit(signal.SIGINT, None)


@contextmanager
def serving(app: FastAPI) -> Iterator[RunningGateway]:
    """As `running_gateway`, of an application that is there."""
    gateway = app.state.gateway
    server = uvicorn.Server(server_config(app, gateway.settings, gateway.bodies, gateway.drain))
    with _in_a_thread(server, gateway) as (url, _), _client(url, app) as http:
        yield RunningGateway(url=url, gateway=gateway, http=http)


def _client(url: str, app: FastAPI) -> httpx.Client:
    """A client to whom every answer must come as it is documented."""
    return httpx.Client(base_url=url, timeout=30, event_hooks=Documented(app).hooks())


@contextmanager
def _in_a_thread(server: uvicorn.Server, gateway: Gateway) -> Iterator[tuple[str, threading.Thread]]:
    """The port that the gateway listens on, and its thread."""
    listener = tcp_socket("127.0.0.1")
    listener.bind(("127.0.0.1", 0))
    look_at_redis(gateway.settings)  # before its own first look, as the service does
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        wait_until(lambda: server.started, "the gateway listens")
        yield url, thread
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
