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
#: An image of others -> the variables that it reads (as far as we set them), and the paths that it answers.
IMAGES_OF_OTHERS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "oliver006/redis_exporter": (
        frozenset({
            "REDIS_ADDR", "REDIS_USER", "REDIS_PASSWORD", "REDIS_EXPORTER_CONFIG_COMMAND",
            "REDIS_EXPORTER_SET_CLIENT_NAME", "REDIS_EXPORTER_EXCLUDE_LATENCY_HISTOGRAM_METRICS",
            "REDIS_EXPORTER_CONNECTION_TIMEOUT", "REDIS_EXPORTER_TLS_CA_CERT_FILE",
        }),
        frozenset({"/scrape", "/health"}),
    ),
    "redis": (
        frozenset({"NAMESPACE", "READER_PASSWORD", "REPLICA_PASSWORD", "SENTINEL_PASSWORD", "PEER_PASSWORD"}),
        frozenset(),
    ),
}  # fmt: skip
#: Pods that a chart brings: nothing here has them.
OF_OTHERS = [{"key": "app.kubernetes.io/name", "operator": "In", "values": ["valkey"]}]
#: Objects of the whole cluster.
OF_THE_CLUSTER = ("Namespace", "PriorityClass")
#: Which installation it belongs to: in every selector.
INSTANCE = "app.kubernetes.io/instance"


def kinds(objects: Iterable[Manifest], *wanted: str) -> list[Manifest]:
    return [one for one in objects if one["kind"] in wanted]


def one(objects: Iterable[Manifest], kind: str, name: str) -> Manifest:
    """The only one of this kind that is called blockrelay-NAME."""
    (found,) = [each for each in kinds(objects, kind) if each["metadata"]["name"] == f"blockrelay-{name}"]
    return found


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
    """Returns whether a selector selects these labels: matchLabels, and matchExpressions with In or Exists."""
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    expressions: list[Manifest] = selector.get("matchExpressions", [])
    return all(labels.get(name) == value for name, value in wanted.items()) and all(
        one["key"] in labels
        if one["operator"] == "Exists"
        else one["operator"] == "In" and labels.get(one["key"]) in one["values"]
        for one in expressions
    )


def found_by(selector: Mapping[str, Any], objects: Iterable[Manifest]) -> list[Manifest]:
    """Workloads whose pods it selects."""
    return [one for one in kinds(objects, *WORKLOADS) if matches(selector, labels_of(one))]


def of_others(selector: Mapping[str, Any]) -> bool:
    return selector == {"matchExpressions": OF_OTHERS}


def peers_of(policy: Manifest) -> list[Manifest]:
    """Everybody that a NetworkPolicy lets in or out."""
    rules = [rule for way in ("ingress", "egress") for rule in policy["spec"].get(way, [])]
    return [peer for rule in rules for peer in (*rule.get("from", ()), *rule.get("to", ()))]


def selectors_of(one: Manifest) -> list[Mapping[str, Any]]:
    """The selectors by which an object finds pods of ours in its own namespace."""
    spec, found = one.get("spec", {}), list[Mapping[str, Any]]()
    match one["kind"]:
        case "Service":
            found.append({"matchLabels": spec["selector"]})
        case "PodDisruptionBudget" | "PodMonitor":
            found.append(spec["selector"])
        case "NetworkPolicy":
            near = [peer["podSelector"] for peer in peers_of(one) if "namespaceSelector" not in peer]
            found += [spec["podSelector"], *near]
        case "Deployment" | "StatefulSet":
            pod = pod_of(one)
            found += [spec["selector"], *(each["labelSelector"] for each in pod.get("topologySpreadConstraints", []))]
            found += [each["labelSelector"] for each in apart(one)]
        case _:
            pass
    return [selector for selector in found if not of_others(selector)]


def apart(workload: Manifest) -> list[Manifest]:
    """From whom its pods must be, and in what sense."""
    rules = pod_of(workload).get("affinity", {}).get("podAntiAffinity", {})
    return rules.get("requiredDuringSchedulingIgnoredDuringExecution", [])


def ports_of(workloads: Iterable[Manifest]) -> set[object]:
    """By name and by number."""
    found = [port for w in workloads for container in containers(w) for port in container.get("ports", [])]
    return {port["name"] for port in found} | {port["containerPort"] for port in found}


def image_of(container: Manifest) -> tuple[str, str]:
    """Its name, of the last two parts (a registry may stand before them), and its version or digest."""
    text = str(container.get("image", ""))
    name, _, tag = text.partition("@") if "@" in text else text.rpartition(":")
    return "/".join(name.split("/")[-2:]), tag


def settings_of(workload: Manifest) -> type[Settings] | None:
    return next((IMAGES[name][0] for c in containers(workload) if (name := image_of(c)[0]) in IMAGES), None)


def environment(container: Manifest) -> dict[str, str | None]:
    """Its variables; None for what is read from elsewhere."""
    return {one["name"]: one.get("value") for one in container.get("env", [])}


def of_other_image(container: Manifest) -> tuple[frozenset[str], frozenset[str]]:
    """The variables that it reads, and the paths that it answers."""
    name = image_of(container)[0]
    found = IMAGES_OF_OTHERS.get(name) or IMAGES_OF_OTHERS.get(name.rpartition("/")[2])
    return found or (frozenset(), frozenset())


def paths_of(workload: Manifest, port: object) -> frozenset[str]:
    """What is answered at one of its ports, by name or number."""
    (container,) = containers(workload)
    name, metrics = image_of(container)[0], environment(container).get("BLOCKRELAY_METRICS_PORT")
    if name not in IMAGES:
        return of_other_image(container)[1]
    told = IMAGES[name][2]
    own = [one for one in container["ports"] if metrics is not None and one["containerPort"] == int(metrics)]
    if not own:
        return told
    return frozenset({"/metrics"}) if port in (own[0]["name"], own[0]["containerPort"]) else told - {"/metrics"}


def cell_of(workload: Manifest) -> str | None:
    """As its services read it from the label."""
    return labels_of(workload).get("blockrelay.io/cell")
