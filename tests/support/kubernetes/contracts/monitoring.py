"""What the Prometheus operator and Grafana get: endpoints that services have, and the files of the project."""

import json
import re
from collections.abc import Iterator

import yaml

from tests.support.kubernetes.contracts.network import ways
from tests.support.kubernetes.contracts.objects import called, found_by, kinds, labels_of, paths_of, ports_of
from tests.support.kubernetes.rendering import Manifest
from tests.support.project import ROOT

_PROMETHEUS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
#: Alerts and panels choose by them.
JOBS = {job["job_name"] for job in _PROMETHEUS["scrape_configs"] if job["job_name"] != "blockrelay-redis"}
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
                if endpoint["port"] not in ports_of([workload]) or endpoint["path"] not in paths_of(workload):
                    yield f"{called(one)}: {called(workload)} has no {endpoint['path']} at {endpoint['port']}"
                jobs.add(_job(endpoint, labels_of(workload)))
            policies = kinds(objects, "NetworkPolicy")
            open_to_all = any(
                "from" not in rule
                for policy in policies
                if workload in found_by(policy["spec"]["podSelector"], objects)
                for rule in policy["spec"].get("ingress", [])
            )
            peers = [peer.get("namespaceSelector", {}) for peer in ways(policies, workload, "ingress", "from")]
            if not open_to_all and not any("monitoring" in p.get("matchLabels", {}).values() for p in peers):
                yield f"{called(one)}: no policy lets Prometheus reach {called(workload)}"
    if kinds(objects, "PodMonitor") and jobs != JOBS:
        yield f"pods are scraped as {sorted(jobs)}, not as {sorted(JOBS)}"


def _job(endpoint: Manifest, labels: dict[str, str]) -> str:
    """What Prometheus makes of the endpoint's relabelings."""
    (rule,) = endpoint["relabelings"]
    assert rule["targetLabel"] == "job"
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
