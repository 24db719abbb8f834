"""Metrics at a port of their own: there nothing but them, and nothing of them where clients are."""

import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import UsageError
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.api.operations.scrape import Scrape, metrics_port
from blockrelay_gateway.app import create_app
from tests.support.gateway.played import RunningGateway, serving
from tests.support.gateway.process import launch
from tests.support.redis.redis_server import RedisServer
from tests.support.scraping import assert_service_describes_itself, sampled
from tests.support.waiting import wait_until


@pytest.fixture
def apart(settings: GatewaySettings) -> GatewaySettings:
    return settings.model_copy(update={"metrics_port": 0})


@pytest.fixture
def both(apart: GatewaySettings) -> Iterator[tuple[RunningGateway, str]]:
    """A gateway, and the address of its metrics."""
    app = create_app(apart)
    server = metrics_port(apart, app.state.scrape)
    assert server is not None
    with serving(app) as gateway:
        yield gateway, f"http://127.0.0.1:{server.port}"
    server.close()


def test_clients_find_no_metrics_and_prometheus_nothing_else(both: tuple[RunningGateway, str]) -> None:
    gateway, metrics = both
    answer = gateway.http.get("/metrics")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
    assert "/metrics" not in gateway.http.get("/openapi.json").json()["paths"]
    assert gateway.http.get("/v1/models").status_code == gateway.http.get("/metrics/tenants").status_code == 200
    for path in ("/v1/models", "/v1/completions", "/readyz", "/livez", "/metrics/tenants", "/"):
        assert httpx.get(metrics + path, trust_env=False).status_code == 404

    def told() -> str:
        return httpx.get(f"{metrics}/metrics", trust_env=False).text

    assert_service_describes_itself(told(), "gateway")
    wait_until(lambda: sampled(told(), "blockrelay_ready", question="accepting") == 1, "a scrape sets its gauges")


def test_without_the_setting_there_is_no_second_port(settings: GatewaySettings) -> None:
    app = create_app(settings)
    assert metrics_port(settings, app.state.scrape) is None
    with serving(app) as gateway:
        assert_service_describes_itself(gateway.http.get("/metrics").text, "gateway")


def test_a_port_that_another_has_is_named(apart: GatewaySettings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = apart.model_copy(update={"metrics_port": port})
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port} \(BLOCKRELAY_METRICS_PORT\)"):
            metrics_port(settings, Scrape(create_app(settings).state.gateway.cells))


def test_the_process_opens_both(folder: BlockFolder, redis_server: RedisServer) -> None:
    settings = {"model": str(folder.root), "port": "0", "metrics_port": "0", "redis_url": redis_server.url, "cell": "t"}
    process = launch(settings)
    assert process.stderr is not None
    said = json.loads(process.stderr.readline())
    assert said["event_type"] == "METRICS_LISTENING"
    while json.loads(process.stderr.readline())["event_type"] != "REDIS_CONNECTED":
        pass
    url = f"http://127.0.0.1:{said['data']['port']}/metrics"
    assert_service_describes_itself(httpx.get(url, trust_env=False).text, "gateway")
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0
