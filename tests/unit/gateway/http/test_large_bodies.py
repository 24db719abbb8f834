"""Large bodies: read by a helper process, answered as small ones are, kept by nobody, and no load for others."""

import gc
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets.sync.client as websockets
from fastapi import WebSocket
from starlette.types import Message

from blockrelay.settings import GatewaySettings
from blockrelay_gateway.api.infer.schemas import InferRequest
from blockrelay_gateway.api.infer.websocket import converse
from blockrelay_gateway.api.openai.schemas import ChatRequest, CompletionRequest
from blockrelay_gateway.app import create_app
from blockrelay_gateway.http.body_budget import BodyShare, ReceivedBody
from blockrelay_gateway.http.body_limit import RECEIVED
from tests.support.gateway.played import PlayedWorker, RunningGateway
from tests.support.waiting import wait_until

#: Above what a gateway reads itself.
LARGE = 300_000
CHAT = {"messages": [{"role": "user", "content": "x"}]}
QUIET = {"background": True, "seed": 1}


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    return settings.model_copy(update={"max_body_bytes": 1 << 20, "max_bodies_bytes": 8 << 20, "body_helpers": 1})


def helpers() -> list[int]:
    """The helper processes of gateways in this process."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"anyio" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


@contextmanager
def stopped(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # who reads for a client that has left is ended
            os.kill(process, signal.SIGCONT)


def padded(body: dict[str, Any]) -> str:
    return json.dumps(body) + " " * LARGE


def post(gateway: RunningGateway, path: str, content: str | bytes) -> httpx.Response:
    return gateway.http.post(path, content=content)


def ask_large(gateway: RunningGateway) -> httpx.Response:
    """A first large body, for which a helper starts."""
    answer = post(gateway, "/v1/completions", padded({"prompt": "x", **QUIET}))
    assert answer.status_code == 202, answer.text
    return answer


def test_others_are_served_while_a_helper_reads(gateway: RunningGateway, worker: PlayedWorker) -> None:
    """Each kind of large body waits for the helper, which is stopped; the gateway does not."""
    ask_large(gateway)
    (helper,) = helpers()
    kinds = {
        "/v1/completions": padded({"prompt": "x", **QUIET}),
        "/v1/chat/completions": padded({**CHAT, **QUIET}),
        "/v1/infer": padded({"prompt": "x", "background": True}),
        # few bytes, many objects
        "/v1/completions?": json.dumps({"prompt": "x", "metadata": [{}] * 60_000, **QUIET}),
    }
    with ThreadPoolExecutor() as threads, websockets.connect(gateway.url.replace("http", "ws") + "/ws") as socket:
        with stopped(helper):
            large = [threads.submit(post, gateway, path, body) for path, body in kinds.items()]
            socket.send(json.dumps({"id": "large", "prompt": "x", "background": True}) + " " * LARGE)
            wait_until(
                lambda: gateway.gateway.bodies.used > sum(map(len, kinds.values())) + LARGE, "all of them are there"
            )
            socket.send(json.dumps({"id": "small", "prompt": "x", "background": True}))
            assert json.loads(socket.recv(timeout=20))["id"] == "small"
            assert gateway.http.get("/livez").status_code == 200
            assert gateway.post("/v1/completions", prompt="x", background=True).status_code == 202
            assert not any(one.done() for one in large)
        assert [one.result().status_code for one in large] == [202] * len(kinds)
        assert json.loads(socket.recv(timeout=20))["id"] == "large"
    wait_until(lambda: gateway.gateway.bodies.used == 0, "all room is given back")


BODIES: dict[str, tuple[str, Any]] = {
    "an unknown field": ("/v1/completions", {"prompt": "x", "max_token": 1}),
    "a refused value": ("/v1/chat/completions", {**CHAT, "n": 0}),
    "an unknown model": ("/v1/completions", {"prompt": "x", "model": "gpt-4"}),
    "half a surrogate pair": ("/v1/completions", {"prompt": "x\ud83d"}),
    "too many tokens": ("/v1/completions", {"prompt": [3] * 512}),
    "a wrong type": ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}),
    "no object": ("/v1/completions", [1]),
    "null": ("/v1/completions", None),
    "a tensor that is none": ("/v1/infer", {"session_id": "s", "step": 1, "input_tensors": {"input_ids": 7}}),
    "both forms": ("/v1/infer", {"session_id": "s", "prompt": "x", "input_tensors": {}}),
}


def test_a_large_body_is_answered_as_a_small_one(gateway: RunningGateway) -> None:
    for name, (path, body) in BODIES.items():
        small, large = post(gateway, path, json.dumps(body)), post(gateway, path, padded(body))
        assert small.status_code >= 400
        assert (large.status_code, large.json()) == (small.status_code, small.json()), name
    for content in (b'{"prompt": ', b"\xff\xfe{", b"[" * 5000):
        for padding in (b"", b" " * LARGE):
            answer = post(gateway, "/v1/completions", padding + content)
            assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"], answer.text
    assert len(helpers()) == 1


def test_a_large_body_names_the_same_request(gateway: RunningGateway, worker: PlayedWorker) -> None:
    key = {"idempotency-key": "k"}
    body = {"prompt": "x", "background": True, "metadata": {"a": "b"}}
    small = gateway.http.post("/v1/completions", json=body, headers=key)
    large = gateway.http.post("/v1/completions", content=padded(body), headers=key)
    assert large.json()["id"] == small.json()["id"] and large.headers["idempotent-replayed"] == "true"


def test_a_helper_that_is_killed_is_replaced(gateway: RunningGateway, worker: PlayedWorker) -> None:
    ask_large(gateway)
    (first,) = helpers()
    with ThreadPoolExecutor() as threads:
        os.kill(first, signal.SIGSTOP)
        large = threads.submit(ask_large, gateway)
        wait_until(lambda: gateway.gateway.bodies.used > LARGE, "it is there")
        os.kill(first, signal.SIGKILL)
        assert large.result().status_code == 202
    assert helpers() != [first]


def test_a_stream_keeps_nothing_of_its_body(gateway: RunningGateway, worker: PlayedWorker) -> None:
    """Neither its bytes, nor its JSON, nor what was validated, of large bodies and of small ones."""
    models = {CompletionRequest, ChatRequest, InferRequest}  # their types: isinstance takes seconds for all objects

    def kept() -> list[Any]:
        gc.collect()
        found: list[Any] = gc.get_objects()
        return [one for one in found if type(one) in models or (type(one) is list and len(one) in (4321, 40_001))]

    with ExitStack() as streams:
        for objects in (4321, 40_001):
            for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
                content = json.dumps({**body, "stream": True, "metadata": [{} for _ in range(objects)]})
                assert streams.enter_context(gateway.http.stream("POST", path, content=content)).status_code == 200
        assert gateway.gateway.bodies.used == 0
        wait_until(lambda: kept() == [], "nothing of the bodies is kept", timeout_s=10)


def test_what_would_take_too_much_memory_is_refused(gateway: RunningGateway, worker: PlayedWorker) -> None:
    """A megabyte of empty objects takes 25: more than this gateway's budget."""
    refused = post(gateway, "/v1/completions", b'{"prompt": "x", "metadata": [' + b"{}," * 330_000 + b"{}]}")
    assert refused.status_code == 413 and "MiB of memory" in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "request_too_large"
    assert gateway.gateway.bodies.used == 0 and helpers() == []


def test_a_message_of_a_client_that_leaves_holds_no_room(gateway: RunningGateway, worker: PlayedWorker) -> None:
    ask_large(gateway)
    (helper,) = helpers()
    with stopped(helper):
        with websockets.connect(gateway.url.replace("http", "ws") + "/ws") as socket:
            for number in range(3):
                socket.send(json.dumps({"id": number, "prompt": "x"}) + " " * LARGE)
            wait_until(lambda: gateway.gateway.bodies.used > 2 * LARGE, "they are there")
        wait_until(lambda: gateway.gateway.bodies.used == 0, "their room is given back")


async def test_a_message_whose_client_has_left_before_its_turn_holds_no_room(settings: GatewaySettings) -> None:
    app = create_app(settings)
    gateway = app.state.gateway
    share = BodyShare(gateway.bodies)
    share.take(LARGE)
    letter = {"type": "websocket.receive", "text": "", RECEIVED: ReceivedBody(b"{}", share)}
    messages = [{"type": "websocket.connect"}, letter, {"type": "websocket.disconnect", "code": 1001}]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None: ...

    await converse(gateway, WebSocket({"type": "websocket", "app": app, "headers": []}, receive, send))
    assert not messages and gateway.bodies.used == 0
