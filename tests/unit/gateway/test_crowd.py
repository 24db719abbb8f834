"""Bounds of the process: requests and sockets at once, bytes of bodies at once, length of a head, time to arrive."""

import json
import socket
from contextlib import ExitStack

import httpx
import pytest
import websockets.sync.client as websockets
from websockets.exceptions import InvalidStatus

from blockrelay.settings import GatewaySettings
from tests.played import PlayedWorker, RunningGateway
from tests.waiting import wait_until

MOST, BODIES = 3, 100_000


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    return settings.model_copy(update={"max_connections": MOST, "max_bodies_bytes": BODIES, "arrival_timeout_s": 0.5})


def connected(gateway: RunningGateway) -> socket.socket:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def to_its_end(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


def send_head(gateway: RunningGateway, length: int) -> socket.socket:
    connection = connected(gateway)
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode())
    return connection


def limited(gateway: RunningGateway, limit: str) -> float:
    return gateway.metric("blockrelay_admission_limited_total", limit=limit)


def test_more_at_once_are_told_to_come_back(gateway: RunningGateway, worker: PlayedWorker) -> None:
    body = json.dumps({"prompt": "x", "stream": True})
    with ExitStack() as streams:
        for _ in range(MOST):
            assert streams.enter_context(gateway.http.stream("POST", "/v1/completions", content=body)).is_success
        refused = gateway.post("/v1/completions", prompt="x")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded" and limited(gateway, "connections") == 1
        with pytest.raises(InvalidStatus):
            websockets.connect(gateway.url.replace("http", "ws") + "/v1/infer/ws")
        for path in ("/livez", "/readyz", "/metrics"):
            assert gateway.http.get(path).status_code == 200
    wait_until(lambda: gateway.http.get("/v1/models").status_code == 200, "there is room again")


def test_large_bodies_at_once_are_bounded_together(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with send_head(gateway, 60_000) as slow:
        slow.sendall(b" " * 59_000)

        def refused() -> bool:
            answer = gateway.http.post("/v1/completions", content=b" " * 60_000)
            assert answer.status_code in (400, 503)
            return answer.status_code == 503

        wait_until(refused, "the slow client's body counts")
        assert limited(gateway, "bodies") == 1
        assert gateway.post("/v1/completions", prompt="x", background=True).status_code == 202, "small ones pass"
    wait_until(lambda: not refused(), "its room comes back when it leaves")


def test_a_stream_does_not_hold_the_room_of_its_body(gateway: RunningGateway, worker: PlayedWorker) -> None:
    body = json.dumps({"prompt": "x", "stream": True}) + " " * 60_000
    with ExitStack() as streams:
        for _ in range(MOST):
            assert streams.enter_context(gateway.http.stream("POST", "/v1/completions", content=body)).is_success


def test_an_endless_head_is_refused(gateway: RunningGateway) -> None:
    with pytest.raises((httpx.HTTPError, AssertionError)):
        answer = gateway.http.get("/v1/models", headers={"x-long": "a" * 200_000})
        assert answer.is_success


def test_a_head_that_never_ends_does_not_hold_its_connection(gateway: RunningGateway) -> None:
    whole = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
    for first in (b"", whole[:20]):
        with connected(gateway) as slow:
            slow.sendall(first)
            assert to_its_end(slow) == b""
    with connected(gateway) as slow:
        slow.sendall(whole)
        assert slow.recv(12) == b"HTTP/1.1 200"
        slow.sendall(whole[:20])
        assert b"HTTP/1.1" not in to_its_end(slow)


def test_bytes_that_drip_do_not_hold_it_either(gateway: RunningGateway) -> None:
    with connected(gateway) as slow:
        slow.settimeout(0.05)
        slow.sendall(b"GET /livez HTTP/1.1\r\nx: ")

        def closed() -> bool:
            slow.sendall(b"a")
            try:
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        wait_until(closed, "the gateway has enough of it")


def test_a_body_that_does_not_come_is_given_up(gateway: RunningGateway) -> None:
    with send_head(gateway, 60_000) as slow:
        slow.sendall(b"{")
        answer = to_its_end(slow)
    assert answer.startswith(b"HTTP/1.1 408") and b'"request_timeout"' in answer


def test_who_works_or_is_idle_is_left_alone(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with websockets.connect(gateway.url.replace("http", "ws") + "/v1/infer/ws") as idle:
        with gateway.http.stream(
            "POST", "/v1/completions", content=json.dumps({"prompt": "x", "stream": True})
        ) as running:
            comments = (line for line in running.iter_lines() if line.startswith(":"))
            for _ in range(5):  # one every 0.2 s
                next(comments)
        assert gateway.http.get("/livez").status_code == 200
        idle.send("no JSON")
        assert "error" in str(idle.recv(timeout=10))
