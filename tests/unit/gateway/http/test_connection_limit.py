"""Bounds of the process: requests and sockets at once, bytes of bodies at once, length of a head."""

import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import websockets.sync.client as websockets
from websockets.exceptions import InvalidStatus

from blockrelay.auth.api_keys import Tenant, add_key
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.api.infer.schemas import InferRequest
from tests.support.gateway.played import PlayedWorker, RunningGateway, running_gateway
from tests.support.gateway.sockets import connected, send_head, to_its_end
from tests.support.waiting import wait_until

MOST, BODIES = 3, 100_000


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    return settings.model_copy(update={"max_connections": MOST, "max_bodies_bytes": BODIES})


def connect(gateway: RunningGateway, path: str = "/v1/infer/ws") -> websockets.ClientConnection:
    return websockets.connect(gateway.url.replace("http", "ws") + path)


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
        for path in ("/v1/infer/ws", ""):
            with pytest.raises(InvalidStatus):
                connect(gateway, path)
        wait_until(lambda: gateway.http.get("/readyz").status_code == 200, "the look at the cell before is forgotten")
        for path in ("/livez", "/metrics"):
            assert gateway.http.get(path).status_code == 200
    wait_until(lambda: gateway.http.get("/v1/models").status_code == 200, "there is room again")


def test_one_key_leaves_room_for_others(settings: GatewaySettings, worker: PlayedWorker, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    ada, bob, eve = ({"authorization": f"Bearer {add_key(keys, Tenant(name=n))}"} for n in ("ada", "bob", "eve"))
    with (
        running_gateway(settings.model_copy(update={"api_keys": keys, "max_connections": 8})) as gateway,
        ExitStack() as opened,
    ):
        url = gateway.url.replace("http", "ws") + "/v1/infer/ws"
        for _ in range(3):
            opened.enter_context(websockets.connect(url, additional_headers=ada))
        opened.enter_context(gateway.http.stream("GET", "/v1/status/events", headers=ada))
        refused = gateway.http.get("/v1/models", headers=ada)
        assert refused.status_code == 429 and "this key" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(InvalidStatus) as socket:
            websockets.connect(url, additional_headers=ada)
        assert socket.value.response.status_code == 429
        for _ in range(2):
            opened.enter_context(gateway.http.stream("GET", "/v1/status/events", headers=bob))
        assert gateway.http.get("/v1/models", headers=bob).status_code == 429
        assert gateway.http.get("/v1/models", headers=eve).status_code == 200, "and something for the next"


def test_a_body_is_waited_for_nowhere_without_a_key_and_room(gateway: RunningGateway) -> None:
    with ExitStack() as slow:

        def taken() -> bool:
            """Whether slow bodies take all the room; else one more comes, as one may be closed before its head."""
            if gateway.http.post("/v1/completions").status_code == 503:
                return True
            connection = slow.enter_context(connected(gateway))
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n")
            return False

        wait_until(taken, "they count")
        assert gateway.http.get("/livez").status_code == 200


def test_who_only_connects_keeps_nobody_out(gateway: RunningGateway) -> None:
    with ExitStack() as opened:
        silent = [opened.enter_context(connected(gateway)) for _ in range(MOST + 2)]
        for connection in silent[1::2]:
            connection.sendall(b"GET /v1/mod")  # a head that goes on for ever
        for _ in range(3):
            with httpx.Client() as fresh:
                assert fresh.get(f"{gateway.url}/v1/models").status_code == 200
        assert to_its_end(silent[0]) == b"", "the one that has waited longest is closed"


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


def test_the_messages_of_sockets_count_while_they_arrive(gateway: RunningGateway, worker: PlayedWorker) -> None:
    done = threading.Event()

    def slowly() -> Iterator[str]:
        yield '{"prompt": "x", "background": true'
        yield " " * 59_000
        done.wait()
        yield "}"

    with connect(gateway) as socket, ThreadPoolExecutor() as threads:
        sending = threads.submit(lambda: socket.send(slowly()))
        wait_until(lambda: gateway.gateway.bodies.used > 59_000, "its beginning is there")
        refused = gateway.http.post("/v1/completions", content=b" " * 60_000)
        assert refused.status_code == 503 and limited(gateway, "bodies") == 1
        done.set()
        sending.result()
        assert json.loads(socket.recv(timeout=20))["status"] == "queued"
        assert gateway.gateway.bodies.used == 0


def test_a_message_without_room_is_refused_by_its_name(gateway: RunningGateway, worker: PlayedWorker) -> None:
    large = json.dumps({"id": "a", "session_id": "s", "prompt": "x", "background": True}) + " " * 45_000
    with connect(gateway) as socket:
        with send_head(gateway, 60_000) as slow:
            slow.sendall(b" " * 59_000)
            wait_until(lambda: gateway.gateway.bodies.used == 60_000, "the slow client's body counts")
            socket.send(large)
            answer = json.loads(socket.recv(timeout=20))
            assert (answer["id"], answer["session_id"], answer["error"]["code"]) == ("a", "s", "overloaded")
            assert limited(gateway, "bodies") == 1
        wait_until(lambda: gateway.gateway.bodies.used == 0, "its room comes back when it leaves")
        socket.send(large.replace('"session_id": "s", ', ""))
        assert json.loads(socket.recv(timeout=20))["status"] == "queued", "the socket goes on"


def test_a_message_is_not_read_before_there_is_room(gateway: RunningGateway, worker: PlayedWorker) -> None:
    sent, rest = threading.Event(), threading.Event()

    def in_parts() -> Iterator[str]:
        yield '{"prompt": "x", "background": true'
        yield " " * 60_000
        sent.set()
        rest.wait()
        yield "}"

    with send_head(gateway, 60_000) as slow:
        slow.sendall(b" " * 59_000)
        wait_until(lambda: gateway.gateway.bodies.used == 60_000, "the slow client's body counts")
        with connect(gateway) as socket, ThreadPoolExecutor() as threads:
            answer = threads.submit(lambda: (socket.send(in_parts()), socket.recv(timeout=20))[1])
            assert sent.wait(20)
            for _ in range(3):  # rounds of the event loop, each of which reads what there is
                assert gateway.http.get("/livez").status_code == 200
            assert gateway.gateway.bodies.used == 60_000
            slow.close()
            rest.set()
            assert json.loads(answer.result())["status"] == "queued"


def test_what_was_accepted_does_not_keep_its_message(gateway: RunningGateway, worker: PlayedWorker) -> None:
    def kept() -> list[InferRequest]:
        gc.collect()
        return [thing for thing in gc.get_objects() if isinstance(thing, InferRequest)]

    with connect(gateway) as socket:
        for number in range(8):
            socket.send(json.dumps({"id": number, "prompt": "x"}) + " " * 60_000)
            worker.claim()
            wait_until(lambda: gateway.gateway.bodies.used == 0, "its room is given back")
        assert len(gateway.cell.registry) == 8, "all are under way"
        wait_until(lambda: kept() == [], "nothing keeps what was parsed", timeout_s=10)


def test_a_stream_does_not_hold_the_room_of_its_body(gateway: RunningGateway, worker: PlayedWorker) -> None:
    body = json.dumps({"prompt": "x", "stream": True}) + " " * 60_000
    with ExitStack() as streams:
        for _ in range(MOST):
            assert streams.enter_context(gateway.http.stream("POST", "/v1/completions", content=body)).is_success


def test_an_endless_head_is_refused(gateway: RunningGateway) -> None:
    with pytest.raises((httpx.HTTPError, AssertionError)):
        answer = gateway.http.get("/v1/models", headers={"x-long": "a" * 200_000})
        assert answer.is_success


def test_a_key_has_half_of_the_room_of_large_bodies(
    settings: GatewaySettings, tmp_path: Path, worker: PlayedWorker
) -> None:
    file = tmp_path / "keys.json"
    one, other = (add_key(file, Tenant(name=name)) for name in ("one", "other"))
    more = {"api_keys": file, "max_body_bytes": 20_000, "max_bodies_bytes": 400_000, "max_connections": 9}

    def head(key: str) -> bytes:
        lines = ("POST /v1/completions HTTP/1.1", "host: localhost", f"authorization: Bearer {key}")
        return "\r\n".join((*lines, "content-length: 20000", "\r\n")).encode() + b" "

    with running_gateway(settings.model_copy(update=more)) as gateway, ExitStack() as slow:
        for number in range(1, 6):
            slow.enter_context(connected(gateway)).sendall(head(one))
            wait_until(lambda number=number: gateway.gateway.bodies.used == number * 20_000, "its room is taken")
        answers = [
            gateway.http.post("/v1/completions", content=b" " * 20_000, headers={"authorization": f"Bearer {key}"})
            for key in (one, other)
        ]
        assert [answer.status_code for answer in answers] == [429, 400]
        assert int(answers[0].headers["retry-after"]) >= 1
