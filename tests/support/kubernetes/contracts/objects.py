"""Rendered objects and how they find each other: what every rule asks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from blockrelay.settings import GatewaySettings, SchedulerSettings, Settings, WorkerSettings
from tests.support.kubernetes.rendering import Manifest

#: Takes all objects of one namespace and yields complaints, a sentence each.
Rule = Callable[[list[Manifest]], Iterator[str]]

WORKLOADS = ("Deployment", "StatefulSet")
#: The image of ours -> the settings of its service, its target in deploy/Dockerfile, and the paths that it answers.
IMAGES: Mapping[str, tuple[type[Settings], str, frozenset[str]]] = {
    "blockrelay/gateway": (
        GatewaySettings,
        "gateway",
        frozenset({"/livez", "/readyz", "/readyz?for=accepting", "/metrics", "/metrics/tenants"}),
    ),
    "blockrelay/scheduler": (SchedulerSettings, "scheduler", frozenset({"/livez", "/readyz", "/metrics"})),
    "blockrelay/worker": (WorkerSettings, "worker", frozenset({"/livez", "/readyz", "/metrics"})),
    "blockrelay/worker-gpu": (WorkerSettings, "worker-cuda", frozenset({"/livez", "/readyz", "/metrics"})),
}
#: Pods that a chart brings: nothing here has them.
OF_OTHERS = {"app.kubernetes.io/name": "valkey"}


def kinds(objects: Iterable[Manifest], *wanted: str) -> list[Manifest]:
    return [one for one in objects if one["kind"] in wanted]


def called(one: Manifest) -> str:
    return f"{one['kind']} {one['metadata'].get('name')}"


def pod_of(workload: Manifest) -> Manifest:
    return workload["spec"]["template"]["spec"]


def containers(workload: Manifest) -> list[Manifest]:
    return [*pod_of(workload).get("initContainers", []), *pod_of(workload)["containers"]]


def labels_of(workload: Manifest) -> dict[str, str]:
    """Of its pods."""
    return workload["spec"]["template"]["metadata"]["labels"]


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Of matchLabels, and of matchExpressions with In."""
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    expressions: list[Manifest] = selector.get("matchExpressions", [])
    return all(labels.get(name) == value for name, value in wanted.items()) and all(
        one["operator"] == "In" and labels.get(one["key"]) in one["values"] for one in expressions
    )


def found_by(selector: Mapping[str, Any], objects: Iterable[Manifest]) -> list[Manifest]:
    """Workloads whose pods it selects."""
    return [one for one in kinds(objects, *WORKLOADS) if matches(selector, labels_of(one))]


def of_others(selector: Mapping[str, Any]) -> bool:
    return selector == {"matchLabels": OF_OTHERS}


def ports_of(workloads: Iterable[Manifest]) -> set[object]:
    """By name and by number."""
    found = [port for w in workloads for container in containers(w) for port in container.get("ports", [])]
    return {port["name"] for port in found} | {port["containerPort"] for port in found}


def image_of(container: Manifest) -> tuple[str, str]:
    """Its name, of the last two parts (a registry may stand before them), and its version."""
    name, _, tag = str(container.get("image", "")).rpartition(":")
    return "/".join(name.split("/")[-2:]), tag


def settings_of(workload: Manifest) -> type[Settings] | None:
    return next((IMAGES[name][0] for c in containers(workload) if (name := image_of(c)[0]) in IMAGES), None)


def paths_of(workload: Manifest) -> frozenset[str]:
    """What its service answers."""
    return next((IMAGES[name][2] for c in containers(workload) if (name := image_of(c)[0]) in IMAGES), frozenset[str]())


def cell_of(workload: Manifest) -> str | None:
    """As its services read it from the label."""
    return labels_of(workload).get("blockrelay.io/cell")
