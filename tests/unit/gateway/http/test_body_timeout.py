"""Heads and bodies that do not come: they hold no connection, and those who work or are idle are left alone."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import websockets.sync.client as websockets
from websockets.exceptions import ConnectionClosedError

from blockrelay.settings import GatewaySettings
from tests.support.gateway.played import PlayedWorker, RunningGateway
from tests.support.gateway.sockets import connected, send_head, to_its_end
from tests.support.waiting import wait_until


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    return settings.model_copy(update={"arrival_timeout_s": 1.0})


def test_a_head_that_never_ends_does_not_hold_its_connection(gateway: RunningGateway) -> None:
    whole = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
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


def test_a_message_that_does_not_come_is_given_up(gateway: RunningGateway) -> None:
    def endless() -> Iterator[str]:
        yield "{"
        closed.wait(20)

    closed = threading.Event()
    with (
        websockets.connect(gateway.url.replace("http", "ws") + "/v1/infer/ws") as slow,
        ThreadPoolExecutor() as threads,
    ):
        threads.submit(lambda: slow.send(endless()))
        with pytest.raises(ConnectionClosedError, match="message did not arrive"):
            slow.recv(timeout=20)
        closed.set()


def test_who_works_or_is_idle_is_left_alone(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with websockets.connect(gateway.url.replace("http", "ws") + "/v1/infer/ws") as idle:
        with gateway.http.stream(
            "POST", "/v1/completions", content=json.dumps({"prompt": "x", "stream": True})
        ) as running:
            keep_alives = (line for line in running.iter_lines() if not line)
            for _ in range(5):  # one every 0.2 s
                next(keep_alives)
        assert gateway.http.get("/livez").status_code == 200
        idle.send("no JSON")
        assert "error" in str(idle.recv(timeout=10))
