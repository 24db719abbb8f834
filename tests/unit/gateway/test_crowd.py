"""Bounds of the process: requests and sockets at once, bytes of bodies at once, length of a head."""

import json
from contextlib import ExitStack

import httpx
import pytest
import websockets.sync.client as websockets
from websockets.exceptions import InvalidStatus

from blockrelay.settings import GatewaySettings
from tests.support.played import PlayedWorker, RunningGateway
from tests.support.sockets import send_head
from tests.support.waiting import wait_until

MOST, BODIES = 3, 100_000


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    return settings.model_copy(update={"max_connections": MOST, "max_bodies_bytes": BODIES})


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
