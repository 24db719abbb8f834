"""Admission: what is refused because there is no room, and that a refusal leaves nothing."""

import pytest
from structlog.testing import capture_logs

from blockrelay.settings import GatewaySettings
from tests.support.gateway.played import PlayedWorker, RunningGateway, running_gateway
from tests.support.waiting import wait_until


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    return settings.model_copy(update={"max_in_flight": 2})


def background(gateway: RunningGateway, status: int = 202) -> None:
    assert gateway.post("/v1/completions", prompt="x", max_tokens=8, background=True).status_code == status


def test_what_is_over_the_limit_is_told_when_to_come_back(gateway: RunningGateway, worker: PlayedWorker) -> None:
    background(gateway)
    background(gateway)
    refused = gateway.post("/v1/completions", prompt="x")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "overloaded"
    assert gateway.metric("blockrelay_admission_rejections_total", status="503") == 1
    refused = {"route": "/v1/completions", "reason": "in_flight"}
    assert gateway.metric("blockrelay_refused_requests_total", **refused) == 1
    for claimed in worker.claim(2):
        worker.say(claimed, [5], end="stop")
    background(gateway)


def test_of_several_prompts_all_are_accepted_or_none(gateway: RunningGateway, worker: PlayedWorker) -> None:
    background(gateway)
    refused = gateway.post("/v1/completions", prompt=["a", "b"])
    assert refused.status_code == 503
    assert worker.client.zcard(worker.keys.running) == 1
    assert len(gateway.cell.registry) == 1
    never = gateway.post("/v1/completions", prompt=["a", "b", "c"])
    assert never.status_code == 400 and "send at most 2 at a time" in never.json()["error"]["message"]
    assert gateway.metric("blockrelay_gateway_requests_waiting") == 1
    background(gateway)


def test_what_fits_no_pool_even_alone_is_a_bad_request(gateway: RunningGateway, worker: PlayedWorker) -> None:
    worker.register(pages=3, plan=False)
    refused = gateway.post("/v1/completions", prompt=[3] * 20, max_tokens=40)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_tokens"
    assert "4 KV pages" in refused.json()["error"]["message"]
    assert "largest pool has 3" in refused.json()["error"]["message"]
    assert worker.client.zcard(worker.keys.running) == 0
    background(gateway)


def test_nothing_is_accepted_while_the_queues_memory_is_nearly_used_up(
    settings: GatewaySettings, worker: PlayedWorker
) -> None:
    used = int(worker.client.info("memory")["used_memory"])  # pyright: ignore
    worker.client.config_set("maxmemory", int(used * 1.2))
    try:
        with capture_logs() as said, running_gateway(settings) as gateway:
            wait_until(lambda: gateway.post("/v1/completions", prompt="x", background=True).status_code == 503, "full")
            refused = gateway.post("/v1/completions", prompt="x")
            assert "memory" in refused.json()["error"]["message"]
            worker.client.config_set("maxmemory", 0)
            wait_until(lambda: gateway.post("/v1/completions", prompt="x", background=True).status_code == 202, "room")
        events = [entry["event"] for entry in said]
        assert [event for event in events if event.startswith("REDIS_MEMORY")] == [
            "REDIS_MEMORY_SHORT",
            "REDIS_MEMORY_ENOUGH",
        ]
    finally:
        worker.client.config_set("maxmemory", 0)
