"""What Prometheus and Grafana of compose are given: ports, paths and names are those of the services."""

import re
from typing import Any

import yaml

from deploy.dashboards.__main__ import DASHBOARDS, FOLDER
from tests.support.project import ROOT

COMPOSE: Any = yaml.safe_load((ROOT / "compose.yaml").read_text())
PROMETHEUS: Any = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"


def exposed() -> dict[str, int]:
    """The port of each service that has one, from the target of its image."""
    stages = re.split(r"^FROM ", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.M)
    found = ((re.match(r"\S+ AS (\S+)", stage), re.search(r"^EXPOSE (\d+)", stage, re.M)) for stage in stages)
    ports = {name[1]: int(port[1]) for name, port in found if name and port}
    targets = {name: one["build"]["target"] for name, one in COMPOSE["services"].items() if "build" in one}
    return {name: ports[target] for name, target in targets.items() if target in ports}


def mounts(service: str) -> dict[str, str]:
    """Path inside -> path of the project."""
    volumes = [volume.split(":") for volume in COMPOSE["services"][service]["volumes"]]
    return {inside: outside for outside, inside, *_ in volumes}


def test_every_service_is_scraped_at_the_port_of_its_image() -> None:
    scraped: dict[str, int] = {}
    for job in PROMETHEUS["scrape_configs"]:
        for found in job.get("dns_sd_configs", ()):
            scraped |= dict.fromkeys(found["names"], found["port"])
    workers = {"worker", "worker-gpu", "worker-webgpu"}
    assert scraped == exposed() and {"gateway", "scheduler", *workers} == scraped.keys()
    jobs = {job["job_name"] for job in PROMETHEUS["scrape_configs"]}
    assert {f"blockrelay-{service.partition('-')[0]}" for service in exposed()} <= jobs, "panels choose by these names"


def test_both_redis_servers_are_asked_through_the_exporter() -> None:
    (job,) = [job for job in PROMETHEUS["scrape_configs"] if job["job_name"] == "blockrelay-redis"]
    (targets,) = job["static_configs"]
    assert targets["targets"] == ["redis://redis:6379", "redis://redis-payload:6379"]
    assert {"redis", "redis-payload", "redis-exporter"} <= COMPOSE["services"].keys()
    assert job["relabel_configs"][-1] == {"target_label": "__address__", "replacement": "redis-exporter:9121"}


def test_what_is_mounted_is_there_and_is_where_it_is_looked_for() -> None:
    for service in ("prometheus", "alertmanager", "grafana"):
        for inside, outside in mounts(service).items():
            if outside.startswith("."):
                assert (ROOT / outside).is_dir(), f"{service}: {inside}"
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "blockrelay.yaml").read_text())["providers"]
    assert (ROOT / mounts("grafana")[provider["options"]["path"]]).resolve() == FOLDER
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.removeprefix(provider["options"]["path"] + "/") in {f"{board.name}.json" for board in DASHBOARDS}
    assert mounts("grafana")["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"


def test_prometheus_has_the_alerts_and_tells_alertmanager() -> None:
    assert [(ROOT / "deploy" / "prometheus" / name).exists() for name in PROMETHEUS["rule_files"]] == [True]
    (manager,) = PROMETHEUS["alerting"]["alertmanagers"]
    (targets,) = manager["static_configs"]
    assert targets["targets"] == ["alertmanager:9093"] and "alertmanager" in COMPOSE["services"]


def test_the_source_of_data_is_the_prometheus_beside_it() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus" and source["isDefault"]
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]


def test_traces_are_looked_at_where_they_are_sent() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "jaeger.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("jaeger", "http://jaeger:16686")
    told = COMPOSE["services"]["gateway"]["environment"]
    assert told["OTEL_EXPORTER_OTLP_ENDPOINT"] == "${OTEL_EXPORTER_OTLP_ENDPOINT:-}", "no traces unless asked for"
    command = re.search(r"^# Traces: +OTEL_EXPORTER_OTLP_ENDPOINT=(\S+)", (ROOT / "compose.yaml").read_text(), re.M)
    assert command is not None and command[1] == "http://jaeger:4318"


def test_observability_is_asked_for_and_reaches_no_other_address_than_this_machine() -> None:
    watching = {name: s for name, s in COMPOSE["services"].items() if "observability" in s.get("profiles", ())}
    assert watching.keys() == {"prometheus", "alertmanager", "redis-exporter", "grafana", "jaeger"}
    for service in watching.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
