"""The status server of workers and schedulers: its answers, and that no client can occupy it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from blockrelay.observability import status_server
from blockrelay.observability.status_server import HEAD_BYTES, MAX_CONNECTIONS, StatusServer
from tests.support.waiting import wait_until


@pytest.fixture
def gaps() -> list[str]:
    return []


@pytest.fixture
def server(gaps: list[str]) -> Iterator[StatusServer]:
    registry = CollectorRegistry()
    Counter("asked", "how often", registry=registry).inc()
    server = StatusServer("127.0.0.1", 0, registry, lambda: gaps)
    yield server
    server.close()


def ask(server: StatusServer, path: str, method: str = "GET") -> httpx.Response:
    return httpx.request(method, f"http://127.0.0.1:{server.port}{path}", timeout=5, trust_env=False)


def connect(server: StatusServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=5)


def is_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_it_answers_probes_and_scrapes(server: StatusServer, gaps: list[str]) -> None:
    assert "asked_total 1.0" in ask(server, "/metrics?name=x").text
    assert ask(server, "/livez").json() == {"status": "ok"}
    assert ask(server, "/readyz").json() == {"status": "ready", "reasons": []}
    gaps.append("no stage")
    answer = ask(server, "/readyz")
    assert answer.status_code == 503 and answer.json() == {"status": "not ready", "reasons": ["no stage"]}
    assert ask(server, "/other").status_code == 404
    assert ask(server, "/livez", "HEAD").content == b"" and ask(server, "/livez", "HEAD").status_code == 200
    assert ask(server, "/livez", "POST").status_code == 405


def test_who_says_nothing_makes_room_for_who_asks(server: StatusServer) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(3 * MAX_CONNECTIONS)]
        assert ask(server, "/livez").status_code == 200
        assert is_ended(silent[0]), "the oldest"
        assert threading.active_count() <= before + 2 * MAX_CONNECTIONS
    wait_until(lambda: threading.active_count() <= before, "their threads are gone")


def test_a_connection_lasts_no_longer_than_its_deadline(server: StatusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "DEADLINE_S", 0.1)
    with connect(server) as slow:
        slow.sendall(b"GET /livez HTTP/1.1\r\nx: ")
        assert is_ended(slow)


def test_a_request_without_an_end_is_not_kept(server: StatusServer) -> None:
    with connect(server) as endless:
        endless.sendall(b"GET /" + b"a" * (HEAD_BYTES + 1))
        assert is_ended(endless)
    assert ask(server, "/livez").status_code == 200


def test_a_fault_of_ours_hurts_nobody_else() -> None:
    server = StatusServer("127.0.0.1", 0, CollectorRegistry(), lambda: [str(1 // 0)])
    try:
        with pytest.raises(httpx.RemoteProtocolError):
            ask(server, "/readyz")
        assert ask(server, "/livez").status_code == 200
    finally:
        server.close()


def test_it_listens_on_ipv6_too() -> None:
    server = StatusServer("::1", 0, CollectorRegistry(), list)
    try:
        assert httpx.get(f"http://[::1]:{server.port}/livez", trust_env=False).status_code == 200
    finally:
        server.close()
