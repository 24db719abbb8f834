"""A reader who is refused leaves no trace: a gateway that counts as a reader without one keeps a request alive."""

import json
from collections.abc import Iterator

import pytest

from blockrelay.settings import GatewaySettings
from tests.support.played import PlayedWorker, RunningGateway, running_gateway
from tests.support.waiting import wait_until


@pytest.fixture
def other(settings: GatewaySettings) -> Iterator[RunningGateway]:
    """A second gateway of the cell."""
    with running_gateway(settings) as running:
        yield running


def assert_followed_by_nobody(worker: PlayedWorker, other: RunningGateway) -> None:
    assert len(other.gateway.flights) == 0
    assert list(worker.client.scan_iter("{t}:followers:*")) == []  # pyright: ignore


@pytest.mark.parametrize("position", ["1.2", "1.2.3.4", "x", "-1", "req-000000000000000000000000:1"])
def test_a_position_that_cannot_be_leaves_no_follower(
    gateway: RunningGateway, other: RunningGateway, worker: PlayedWorker, position: str
) -> None:
    body = {"prompt": "x", "stream": True}
    with gateway.http.stream("POST", "/v1/completions", content=json.dumps(body)) as response:
        name = response.headers["x-request-id"]
        refused = other.http.get(f"/v1/requests/{name}/events", params={"starting_after": position})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "starting_after"
        assert_followed_by_nobody(worker, other)
    wait_until(lambda: worker.record(name).get(b"end") == b"cancelled", "the request has ended with its only reader")


def test_a_choice_that_was_forgotten_leaves_no_follower_of_the_others(
    gateway: RunningGateway, other: RunningGateway, worker: PlayedWorker
) -> None:
    body = {"prompt": ["x", "y"], "stream": True}
    with gateway.http.stream("POST", "/v1/completions", content=json.dumps(body)) as response:
        name = response.headers["x-request-id"]
        second = gateway.http.get(f"/v1/requests/{name}").json()["choices"][1]
        worker.client.delete(worker.keys.request(second))
        assert other.http.get(f"/v1/requests/{name}/events").status_code == 404
        assert_followed_by_nobody(worker, other)
