"""A reader who is refused leaves no trace: a gateway that counts as a reader without one keeps a request alive."""

import json
from collections.abc import Iterator

import pytest

from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission import accept as admission
from tests.support.gateway.played import PlayedWorker, RunningGateway, running_gateway
from tests.support.redis.redis_proxy import proxied
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until


@pytest.fixture
def other(settings: GatewaySettings) -> Iterator[RunningGateway]:
    """A second gateway of the cell."""
    with running_gateway(settings) as running:
        yield running


def assert_followed_by_nobody(worker: PlayedWorker, other: RunningGateway) -> None:
    assert len(other.cell.registry) == 0
    assert list(worker.client.scan_iter("{t}:followers:*")) == []  # pyright: ignore


@pytest.mark.parametrize("position", ["1.2", "1.2.3.4", "x", "-1", "req-000000000000000000000000:1"])
def test_a_position_that_cannot_be_leaves_no_follower(
    gateway: RunningGateway, other: RunningGateway, worker: PlayedWorker, position: str
) -> None:
    body = {"prompt": "x", "stream": True}
    with gateway.http.stream("POST", "/v1/completions", content=json.dumps(body)) as response:
        name = own_id(response.headers["x-request-id"])
        refused = other.http.get(f"/v1/requests/{name}/events", params={"starting_after": position})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "starting_after"
        assert_followed_by_nobody(worker, other)
    wait_until(lambda: worker.record(name).get(b"end") == b"cancelled", "the request has ended with its only reader")


def test_a_choice_that_was_forgotten_leaves_no_follower_of_the_others(
    gateway: RunningGateway, other: RunningGateway, worker: PlayedWorker
) -> None:
    body = {"prompt": ["x", "y"], "stream": True}
    with gateway.http.stream("POST", "/v1/completions", content=json.dumps(body)) as response:
        name = own_id(response.headers["x-request-id"])
        second = own_id(gateway.http.get(f"/v1/requests/{name}").json()["choices"][1])
        worker.client.delete(worker.keys.request(second))
        assert other.http.get(f"/v1/requests/{name}/events").status_code == 404
        assert_followed_by_nobody(worker, other)


@pytest.mark.parametrize("needle", [b":followers:", b"EVALSHA"], ids=["it registers", "ACCEPT registers it"])
def test_a_reader_whose_gateway_lost_redis_as_it_registered_holds_nothing(
    gateway: RunningGateway,
    settings: GatewaySettings,
    worker: PlayedWorker,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    needle: bytes,
) -> None:
    monkeypatch.setattr(admission, "ACCEPT_RETRY_S", 0.1)
    key, body = {"idempotency-key": "k"}, json.dumps({"prompt": "x", "stream": True})
    with (
        proxied(redis_server) as proxy,
        running_gateway(settings.model_copy(update={"redis_url": proxy.url})) as other,
    ):
        wait_until(lambda: other.http.get("/readyz").status_code == 200, "the other gateway is ready")
        with gateway.http.stream("POST", "/v1/completions", content=body, headers=key) as response:
            name = own_id(response.headers["x-request-id"])
            proxy.cut_at(needle, runs=True)
            if needle == b"EVALSHA":
                refused = other.http.post("/v1/completions", content=body, headers=key)
            else:
                refused = other.http.get(f"/v1/requests/{name}/events")
            assert refused.status_code == 503, refused.text
            assert worker.client.hlen(worker.keys.followers(name)) == 1, "Redis has it as a reader"
            proxy.heal()
        wait_until(
            lambda: worker.record(name).get(b"end") == b"cancelled", "the request has ended with its only reader"
        )
        assert_followed_by_nobody(worker, other)


def test_a_reader_that_comes_back_to_its_gateway_is_one(
    gateway: RunningGateway, settings: GatewaySettings, worker: PlayedWorker, redis_server: RedisServer
) -> None:
    """Redis fails as it registers; it asks again before the gateway has taken that back."""
    with (
        proxied(redis_server) as proxy,
        running_gateway(settings.model_copy(update={"redis_url": proxy.url})) as other,
    ):
        wait_until(lambda: other.http.get("/readyz").status_code == 200, "the other gateway is ready")
        with gateway.http.stream(
            "POST", "/v1/completions", content=json.dumps({"prompt": "x", "stream": True})
        ) as first:
            name = own_id(first.headers["x-request-id"])
            proxy.lose_reply(b":followers:")
            path = f"/v1/requests/{name}/events"
            assert other.http.get(path).status_code == 503
            with other.http.stream("GET", path) as response:
                first.close()
                left = lambda: gateway.metric("blockrelay_disconnected_clients_total") == 1  # noqa: E731
                wait_until(left, "the first reader has left")
                wait_until(lambda: worker.client.hlen(worker.keys.followers(name)) == 1, "its gateway has looked")
                worker.take([5], end="stop")
                assert "[DONE]" in response.read().decode()
