"""What the Prometheus operator and Grafana get: endpoints that services have, and the files of the project."""

import json
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import yaml

from tests.support.kubernetes.contracts.network import callers, reaches, servers_at
from tests.support.kubernetes.contracts.objects import (
    WORKLOADS,
    called,
    containers,
    environment,
    found_by,
    kinds,
    labels_of,
    paths_of,
    ports_of,
    settings_of,
)
from tests.support.kubernetes.rendering import Manifest
from tests.support.project import ROOT

_PROMETHEUS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
#: The job of the exporter of Redis, which is there only with the exporter.
REDIS_JOB = "blockrelay-redis"
#: The job of compose's proxy: on Kubernetes a Service takes its place.
PROXY_JOB = "blockrelay-proxy"
#: The other jobs, by which alerts and panels choose.
JOBS = {name for job in _PROMETHEUS["scrape_configs"] if (name := job["job_name"]) not in (REDIS_JOB, PROXY_JOB)}
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"


def scraped(objects: list[Manifest]) -> Iterator[str]:
    """Monitors find pods, at ports and paths that these have, under the jobs that alerts and panels choose by."""
    jobs: set[str] = set()
    for one in kinds(objects, "PodMonitor"):
        found = found_by(one["spec"]["selector"], objects)
        if not found:
            yield f"{called(one)} finds no pods"
        for workload in found:
            for endpoint in one["spec"]["podMetricsEndpoints"]:
                port, path = endpoint["port"], endpoint["path"]
                if port not in ports_of([workload]) or path not in paths_of(workload, port):
                    yield f"{called(one)}: {called(workload)} has no {path} at {port}"
                jobs.add(_job(endpoint, labels_of(workload)))
                peers = callers(objects, workload, port)
                if peers is not None and not any(_is_monitoring(peer) for peer in peers):
                    yield f"{called(one)}: no policy lets Prometheus reach {port} of {called(workload)}"
    wanted = JOBS | ({REDIS_JOB} if exporters(objects) else set())
    if kinds(objects, "PodMonitor") and jobs != wanted:
        yield f"pods are scraped as {sorted(jobs)}, not as {sorted(wanted)}"


def private(objects: list[Manifest]) -> Iterator[str]:
    """Ports for metrics are Prometheus' alone, and gateways tell theirs nowhere else."""
    for workload in kinds(objects, *WORKLOADS):
        if "metrics" not in ports_of([workload]):
            if settings_of(workload) is not None:
                yield f"{called(workload)}: it tells clients its metrics: it has no port for them"
            continue
        peers = callers(objects, workload, "metrics")
        if peers is None or not all(_is_monitoring(peer) for peer in peers):
            yield f"{called(workload)}: others than Prometheus reach its metrics"


def exported(objects: list[Manifest]) -> Iterator[str]:
    """The exporter of Redis is sent to every server, and gets there."""
    asked = [target for one in kinds(objects, "PodMonitor") for target in _targets(one)]
    for exporter in exporters(objects):
        for url in asked:
            yield from reaches(objects, exporter, url)
        (container,) = containers(exporter)
        believes = "REDIS_EXPORTER_TLS_CA_CERT_FILE" in environment(container)
        if believes != any(url.startswith("rediss://") for url in asked):
            yield f"{called(exporter)}: it {'has' if believes else 'lacks'} an authority for {asked}"
        for server in (
            one for one in kinds(objects, *WORKLOADS) if one["metadata"]["name"].endswith(("-control", "-payload"))
        ):
            hosts = [host for url in asked if server in servers_at(objects, host := str(urlsplit(url).hostname))]
            if len(set(hosts)) != server["spec"].get("replicas", 1):
                yield f"{called(exporter)}: of {called(server)} it is asked about {hosts}"


def exporters(objects: list[Manifest]) -> list[Manifest]:
    return [one for one in kinds(objects, *WORKLOADS) if any("/scrape" in paths_of(one, p) for p in ports_of([one]))]


def _targets(monitor: Manifest) -> list[str]:
    found = [each.get("params", {}).get("target", []) for each in monitor["spec"]["podMetricsEndpoints"]]
    return [target for targets in found for target in targets]


def _is_monitoring(peer: Manifest) -> bool:
    return "monitoring" in peer.get("namespaceSelector", {}).get("matchLabels", {}).values()


def _job(endpoint: Manifest, labels: dict[str, str]) -> str:
    """What Prometheus makes of the endpoint's relabelings."""
    (rule,) = [one for one in endpoint["relabelings"] if one["targetLabel"] == "job"]
    if "sourceLabels" not in rule:
        return rule["replacement"]
    (source,) = rule["sourceLabels"]
    meta = {f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": text for name, text in labels.items()}
    found = re.fullmatch(rule["regex"], meta.get(source, ""))
    return rule["replacement"].replace("$1", found[1]) if found else ""


def alerted(objects: list[Manifest]) -> Iterator[str]:
    """Alerts and dashboards are those of deploy/prometheus and deploy/grafana, all of them."""
    for one in kinds(objects, "PrometheusRule"):
        if one["spec"] != ALERTS:
            yield f"{called(one)} is not deploy/prometheus/alerts.yml: make manifests"
    boards = [one for one in kinds(objects, "ConfigMap") if "grafana_dashboard" in one["metadata"].get("labels", {})]
    shown = {name: json.loads(text) for one in boards for name, text in one["data"].items()}
    if boards and shown != {path.name: json.loads(path.read_text()) for path in DASHBOARDS.glob("*.json")}:
        yield f"the dashboards {sorted(shown)} are not those of deploy/grafana"
