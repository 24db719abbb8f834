"""`docker compose --profile observability up`: targets are scraped, rules are loaded, somebody is told."""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from blockrelay.protocol.encoding.request_ids import own_id
from tests.support.models.tiny_model import write_tiny_model
from tests.support.project import ROOT
from tests.support.systems.compose_stack import ComposeStack, leftovers, mountable_copy, run
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

PROFILE = ("prometheus", "alertmanager", "redis-exporter", "grafana", "jaeger")
#: Somebody who is told of alerts: each message is a line of the container's log.
WEBHOOK = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Told(BaseHTTPRequestHandler):
    def do_POST(self):
        print(self.rfile.read(int(self.headers["content-length"])).decode(), flush=True)
        self.send_response(200)
        self.end_headers()
HTTPServer(("", 8080), Told).serve_forever()
"""


def is_here(service: str) -> bool:
    """Whether the engine has the image, or what stands in for it."""
    image = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][service]["image"]
    return subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode == 0


def with_webhook(folder: Path) -> Path:
    """A compose file that adds somebody to be told, and tells Alertmanager of it."""
    config = yaml.safe_load((ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text())
    config["receivers"][0]["webhook_configs"] = [{"url": "http://webhook:8080"}]
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
    (folder / "alertmanager.yml").chmod(0o644)
    services = {
        "webhook": {
            "image": "python:3.11-slim",
            "command": ["python3", "-c", WEBHOOK],
            "networks": ["inside"],
            "init": True,
        },
        "alertmanager": {"volumes": [f"{folder}:/etc/alertmanager:ro"]},
    }
    (folder / "webhook.yaml").write_text(yaml.safe_dump({"services": services}))
    return folder / "webhook.yaml"


@pytest.fixture(scope="module")
def stack() -> Iterator[ComposeStack]:
    """The system and what of the profile can be had here."""
    with tempfile.TemporaryDirectory(prefix="blockrelay-compose-") as name:
        folder = Path(name)
        model = mountable_copy(write_tiny_model(folder / "made"), folder)
        watching = [service for service in PROFILE if is_here(service)]
        stack = ComposeStack(model, with_webhook(folder), profile="observability")
        stack.down()
        try:
            stack.build()
            stack.up("proxy", "gateway", "worker", "scheduler", "webhook", *watching)
            yield stack
        finally:
            stack.down()
        assert not leftovers()


def told(stack: ComposeStack, alert: str) -> list[str]:
    """What somebody was told of an alert: firing, resolved, in that order."""
    (container,) = stack.containers("webhook")
    lines = run("docker", "logs", container).splitlines()
    alerts = [found for line in lines if line.startswith("{") for found in json.loads(line)["alerts"]]
    return [found["status"] for found in alerts if found["labels"]["alertname"] == alert]


def ask(url: str, **parameters: str) -> Any:
    answer = httpx.get(url, params=parameters, timeout=10)
    assert answer.is_success, answer.text
    return answer.json()


def test_everything_is_scraped_and_every_rule_is_loaded(stack: ComposeStack) -> None:
    prometheus = stack.address("prometheus")
    workers = len(stack.containers("worker"))
    expected = {
        "blockrelay-gateway": 1,
        "blockrelay-scheduler": 1,
        "blockrelay-worker": workers,
        "blockrelay-tenants": 1,
        "blockrelay-proxy": 1,
        "blockrelay-redis": 2,
    }

    def scraped() -> dict[str, int]:
        found = ask(f"{prometheus}/api/v1/query", query="sum by (job) (up)")["data"]["result"]
        return {series["metric"]["job"]: int(series["value"][1]) for series in found}

    wait_until(lambda: scraped() == expected, f"{expected} are scraped", timeout_s=60)
    rules = ask(f"{prometheus}/api/v1/rules")["data"]["groups"]
    committed = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    # Prometheus sorts groups by their names.
    names = {group["name"]: [rule["name"] for rule in group["rules"]] for group in rules}
    assert names == {
        group["name"]: [rule.get("alert") or rule["record"] for rule in group["rules"]] for group in committed
    }
    memory = ask(f"{prometheus}/api/v1/query", query="redis_memory_max_bytes")["data"]["result"]
    assert len(memory) == 2 and all(float(series["value"][1]) > 0 for series in memory)


def test_somebody_is_told_that_redis_is_gone_and_that_it_is_back(stack: ComposeStack) -> None:
    (redis,) = stack.containers("redis")
    stack.kill(redis)
    wait_until(lambda: told(stack, "BlockrelayNotAccepting") == ["firing"], "somebody is told", timeout_s=180)
    stack.start(redis)
    wait_until(lambda: told(stack, "BlockrelayNotAccepting")[-1] == "resolved", "it is over", timeout_s=300)


def test_grafana_has_the_dashboards_and_their_sources_answer(stack: ComposeStack) -> None:
    if not is_here("grafana"):
        pytest.skip("NOT TESTED: Grafana's image cannot be had here")
    grafana = stack.address("grafana")
    found: list[dict[str, Any]] = []

    def provisioned() -> bool:
        found[:] = ask(f"{grafana}/api/search", type="dash-db")
        return bool(found)

    wait_until(provisioned, "the dashboards are there", timeout_s=120)
    committed = [json.loads(file.read_text()) for file in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")]
    assert {board["uid"] for board in found} == {board["uid"] for board in committed}


def test_jaeger_has_the_trace_of_a_request(stack: ComposeStack) -> None:
    if not is_here("jaeger"):
        pytest.skip("NOT TESTED: Jaeger's image cannot be had here")
    body = {"prompt": [1, 5, 9], "max_tokens": 3}
    request_id = own_id(httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60).json()["id"])
    jaeger = stack.address("jaeger")

    def traced() -> bool:
        traces = ask(f"{jaeger}/api/traces", service="blockrelay-gateway")["data"]
        return request_id in json.dumps(traces)

    wait_until(traced, "its trace is there", timeout_s=60)
