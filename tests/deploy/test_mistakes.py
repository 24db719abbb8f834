"""Mistakes that people make in manifests, planted: each is found. Schemas alone find two of the first fifteen."""

from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from blockrelay import __version__
from tests.support.kubernetes.contracts.objects import INSTANCE, containers, found_by, one, selectors_of
from tests.support.kubernetes.contracts.rules import complaints
from tests.support.kubernetes.custom_resources import custom_complaints
from tests.support.kubernetes.mistakes import Change, drop, put
from tests.support.kubernetes.rendering import Manifest, schema_complaints
from tests.support.kubernetes.variants import FAILOVER

Render = Callable[[str], list[Manifest]]
#: Name -> what is done to the objects.
Mistakes = Mapping[str, Change | tuple[Change, ...]]


def without(kind: str, name: str = "") -> Change:
    """Leave out all objects of a kind whose names have this in them."""

    def change(objects: list[Manifest]) -> None:
        objects[:] = [each for each in objects if not (each["kind"] == kind and name in each["metadata"]["name"])]

    return change


def probed_as(probe: str, other: str) -> Change:
    """Ask the control Redis by one probe what another one asks."""

    def change(objects: list[Manifest]) -> None:
        server = containers(one(objects, "StatefulSet", "redis-control"))[0]
        server[probe]["exec"] = server[other]["exec"]

    return change


def encoded(text: str) -> str:
    """A value of a Secret."""
    return b64encode(text.encode()).decode()


def scaled_twice(objects: list[Manifest]) -> None:
    first = one(objects, "ScaledObject", "worker-cpu")
    again = {"scaleTargetRef": first["spec"]["scaleTargetRef"], "minReplicas": 1, "maxReplicas": 8, "metrics": []}
    objects.append({**first, "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": again})


VERSION = "app.kubernetes.io/version"
TEMPLATE_LABELS = "spec template metadata labels"
GATEWAY, SCHEDULER, WORKER = "Deployment gateway", "Deployment scheduler", "Deployment worker-cpu"
CONTROL, SCALER = "StatefulSet redis-control", "ScaledObject worker-cpu"
TRIGGER = "spec triggers 0"
COMES_TO_REDIS = "spec ingress 0 from 0 podSelector"
ENDPOINTS = "spec podMetricsEndpoints"
REDIS_URL = "data BLOCKRELAY_REDIS_URL"

SEEN_BY_SCHEMA: Mistakes = {
    "misspelt": put(GATEWAY, "spec replica", 3),
    "port as text": put(GATEWAY, "container ports 0 containerPort", "8000"),
}
SEEN_BY_SCHEMA_OF_OTHERS: Mistakes = {
    "misspelt interval": put(SCALER, "spec pollingIntervall", 5),
    "interval as text": put(SCALER, "spec pollingInterval", "5"),
    "interval without unit": put("PodMonitor tenants", f"{ENDPOINTS} 0 interval", "5"),
}
#: Of the overlay demo.
OF_DEMO: Mistakes = {
    "long port name": put(GATEWAY, "container ports 0 name", "hypertext-transfer"),
    "other labels": put(GATEWAY, "spec selector matchLabels app.kubernetes.io/component", "gate"),
    "request above limit": put(WORKER, "container resources requests cpu", "3"),
    "mount without volume": put(GATEWAY, "container volumeMounts +", {"name": "models", "mountPath": "/models"}),
    "budget with both": put("PodDisruptionBudget gateway", "spec minAvailable", 1),
    "bad name": put("Service gateway", "metadata name", "Blockrelay_Gateway"),
    "empty image": put(GATEWAY, "container image", ""),
    "a pause that leaves the drain no time": put(
        GATEWAY, "container lifecycle", {"preStop": {"sleep": {"seconds": 10}}}
    ),
    "long gateway drain": put(GATEWAY, "container env BLOCKRELAY_GATEWAY_DRAIN_S value", "120"),
    "deaf at once": drop(GATEWAY, "container env BLOCKRELAY_GATEWAY_LINGER_S"),
    "shared single writer": put(CONTROL, "spec volumeClaimTemplates 0 spec accessModes +", "ReadWriteMany"),
    "port 70000": put(GATEWAY, "container ports 0 containerPort", 70000),
    "quantity": put(GATEWAY, "container resources limits memory", "1536Mib"),
    "removed version": put("PodDisruptionBudget gateway", "apiVersion", "policy/v1beta1"),
    "privileged": put(GATEWAY, "container securityContext privileged", True),
    # As it is where a component is added to a base that has a namespace, and the overlay has none.
    "elsewhere": drop("Service gateway", "metadata namespace"),
    "unknown setting": put(WORKER, "container env +", {"name": "BLOCKRELAY_TREADS", "value": "2"}),
    "service links": drop(GATEWAY, "pod enableServiceLinks"),
    "drain without time": put(WORKER, "pod terminationGracePeriodSeconds", 30),
    "policy for nobody": put("NetworkPolicy redis", "spec ingress 0 ports 0 port", "http"),
    "no policies": without("NetworkPolicy"),
    "no way to names": drop("NetworkPolicy services", "spec egress 1"),
    "misspelt worker": put("NetworkPolicy services", "spec podSelector matchExpressions 0 values 2", "worker"),
    "nobody may come": put("NetworkPolicy redis", f"{COMES_TO_REDIS} matchExpressions 0 values", ["gateway"]),
    "misspelt redis": put("Secret redis-worker", REDIS_URL, encoded("redis://blockrelay-redis:6379/0")),
    "nobody may go": put("PodDisruptionBudget gateway", "spec maxUnavailable", 0),
    "the last one must stay": (
        drop("PodDisruptionBudget redis-control", "spec maxUnavailable"),
        put("PodDisruptionBudget redis-control", "spec minAvailable", 1),
    ),
    "volume of root": drop(CONTROL, "pod securityContext fsGroup"),
    "of another cell": put(SCHEDULER, f"{TEMPLATE_LABELS} blockrelay.io/cell", "c1"),
    "of another release": put(SCHEDULER, f"metadata labels {VERSION}", "0.1.0"),
    "claims of a release": put(CONTROL, f"spec volumeClaimTemplates 0 metadata labels {VERSION}", __version__),
    "redis of a release": put("Deployment redis-payload", f"{TEMPLATE_LABELS} {VERSION}", __version__),
    "cell by hand": drop(SCHEDULER, "container env BLOCKRELAY_CELL"),
    # Selectors that take the pods of another installation
    "service of any instance": drop("Service gateway", f"spec selector {INSTANCE}"),
    "deployment of any instance": drop(SCHEDULER, f"spec selector matchLabels {INSTANCE}"),
    "budget of any instance": drop("PodDisruptionBudget worker-cpu", f"spec selector matchLabels {INSTANCE}"),
    "policy of any instance": drop("NetworkPolicy nothing", f"spec podSelector matchLabels {INSTANCE}"),
    "policy for anybody here": drop("NetworkPolicy redis", f"{COMES_TO_REDIS} matchLabels"),
    "spread over any instance": drop(GATEWAY, f"pod topologySpreadConstraints 1 labelSelector matchLabels {INSTANCE}"),
    "pods of another instance": put(GATEWAY, f"{TEMPLATE_LABELS} {INSTANCE}", "another"),
    # Where pods go
    "one zone": drop(SCHEDULER, "pod topologySpreadConstraints topology.kubernetes.io/zone"),
    "one host": drop(WORKER, "pod topologySpreadConstraints 0"),
    # Probes and deadlines
    "redis that only listens": (
        drop(CONTROL, "container livenessProbe exec"),
        put(CONTROL, "container livenessProbe tcpSocket", {"port": "redis"}),
    ),
    "redis that reads is ended": probed_as("livenessProbe", "readinessProbe"),
    "redis that reads is no start": probed_as("startupProbe", "readinessProbe"),
    "redis that reads is ready": probed_as("readinessProbe", "livenessProbe"),
    "impatient with redis": put(CONTROL, "container livenessProbe failureThreshold", 2),
    "deadline before the start": drop(WORKER, "spec progressDeadlineSeconds"),
    # Metrics
    "metrics where clients are": (
        drop(GATEWAY, "container env BLOCKRELAY_METRICS_PORT"),
        drop(GATEWAY, "container ports metrics"),
    ),
    "metrics at another port": put(GATEWAY, "container ports 1 containerPort", 9999),
    "metrics for everybody": put("NetworkPolicy clients", "spec ingress 0 ports +", {"port": "metrics"}),
    "every port for everybody": put("NetworkPolicy clients", "spec ingress", [{}]),
}
#: Of the overlay production, which has components.
OF_PRODUCTION: Mistakes = {
    "trigger of another cell": put(SCALER, f"{TRIGGER} metadata listName", "{c1}:running"),
    "trigger of a queue": put(SCALER, f"{TRIGGER} metadata listName", "{c0}:queue:model:cpu"),
    "misspelt parameter": put(SCALER, f"{TRIGGER} metadata listLenght", "16"),
    "scaler of nobody": put(SCALER, "spec scaleTargetRef name", "blockrelay-worker"),
    "number is set back": put(WORKER, "spec replicas", 2),
    "scaler elsewhere": drop(SCALER, "metadata namespace"),
    "scaled twice": scaled_twice,
    "keda without a password": drop("Secret redis-keda", "data password"),
    "keda is shut out": drop("NetworkPolicy keda"),
    "address of our namespace only": put("Secret redis-keda", "data address", encoded("blockrelay-redis-control:6379")),
    "url without tls": put(
        "Secret redis-worker", REDIS_URL, encoded("redis://worker:x@blockrelay-redis-control:6379/0")
    ),
    "nobody to believe": put(WORKER, "container volumeMounts 0 mountPath", "/etc/redis"),
    "password elsewhere": (
        drop(GATEWAY, "container volumeMounts redis-password"),
        drop(GATEWAY, "pod volumes redis-password"),
    ),
    "keys as one file": (
        put(GATEWAY, "container volumeMounts api-keys subPath", "api-keys.json"),
        put(GATEWAY, "container volumeMounts api-keys mountPath", "/etc/blockrelay/keys/api-keys.json"),
    ),
    "keys under new names": (
        put("Secret api-keys", "metadata name", "blockrelay-api-keys-7k2h9dt6mc"),
        put(GATEWAY, "pod volumes api-keys secret secretName", "blockrelay-api-keys-7k2h9dt6mc"),
    ),
    "users without a file": drop("Secret redis-users", "data payload.acl"),
    "monitor of another port": put("PodMonitor", f"{ENDPOINTS} 0 port", "http"),
    "jobs of another name": put("PodMonitor tenants", f"{ENDPOINTS} 0 relabelings 0 replacement", "tenants"),
    "prometheus is shut out": drop("NetworkPolicy metrics"),
    "stale alerts": drop("PrometheusRule", "spec groups 0 rules -1"),
    "dashboard left out": drop("ConfigMap dashboard-system"),
    "monitor of any instance": drop("PodMonitor tenants", f"spec selector matchLabels {INSTANCE}"),
    # Who is moved away
    "redis without priority": drop(CONTROL, "pod priorityClassName"),
    "redis below services": put("PriorityClass redis", "value", 1),
    "priority that is not there": drop("PriorityClass services"),
    "priority in a namespace": put("PriorityClass redis", "metadata namespace", "blockrelay"),
    "probe without tls": put(CONTROL, "container livenessProbe exec", {"command": ["redis-cli", "ping"]}),
    # The exporter of Redis
    "exporter without tls": put(
        "PodMonitor redis", f"{ENDPOINTS} 0 params target", ["redis://blockrelay-redis-control:6379"]
    ),
    "exporter of one server": drop("PodMonitor redis", f"{ENDPOINTS} 1"),
    "exporter is shut out": drop("NetworkPolicy redis", f"{COMES_TO_REDIS} matchExpressions 0 values redis-exporter"),
    "exporter of another job": put("PodMonitor redis", f"{ENDPOINTS} 0 relabelings 0 replacement", "redis"),
    "exporter believes nobody": drop("Deployment redis-exporter", "container env REDIS_EXPORTER_TLS_CA_CERT_FILE"),
    # Images and the model
    "redis by tag": put(CONTROL, "container image", "redis:7.4"),
    "half a digest": put(GATEWAY, "container image", "registry.example/blockrelay/gateway@sha256:0000"),
    "no volume for the model": drop(WORKER, "container volumeMounts model"),
    "bundled model": tuple(
        drop(f"Deployment {each}", "container env BLOCKRELAY_MODEL") for each in ("gateway", "scheduler", "worker-cpu")
    ),
    "two models": drop(SCHEDULER, "container env BLOCKRELAY_MODEL"),
}
#: Of a control Redis that fails over.
OF_FAILOVERS: Mistakes = {
    "one master for ever": put(
        "Secret redis-worker",
        "data BLOCKRELAY_PAYLOAD_REDIS_URL",
        encoded("rediss://worker:x@blockrelay-redis-control-0.blockrelay-redis-podz:6379/0"),
    ),
    "sentinels on one host": drop("StatefulSet sentinel", "pod affinity"),
    "sentinels without tls": put("StatefulSet sentinel", "container args --tls-port", "--port"),
    "sentinels are shut out": drop("NetworkPolicy sentinels"),
    "nobody goes to sentinels": drop("NetworkPolicy to-sentinels"),
    "sentinels without names": drop("Service sentinel", "spec clusterIP"),
    "two sentinels": put("StatefulSet sentinel", "spec replicas", 2),
    "keda asks one server": put(SCALER, f"{TRIGGER} type", "redis"),
    "keda asks for another master": put(SCALER, f"{TRIGGER} metadata sentinelMaster", "mymaster"),
    "keda gets to no sentinel": put(
        "NetworkPolicy keda", "spec podSelector matchExpressions 0 values", ["redis-control"]
    ),
    "exporter of the first alone": drop("PodMonitor redis", f"{ENDPOINTS} -1"),
    "users of sentinels left out": without("Secret", "sentinel-users"),
}
HPA, WANTED = "HorizontalPodAutoscaler worker-cpu", "spec metrics 0 external"
INGRESS_ANNOTATIONS = "metadata annotations nginx.ingress.kubernetes.io"
#: Overlay -> the mistakes that rules of ours find in it.
FOUND_BY_RULES: Mapping[str, Mistakes] = {
    "demo": OF_DEMO,
    "production": OF_PRODUCTION,
    FAILOVER: OF_FAILOVERS,
    "with-hpa": {
        "wanted by another cell": put(HPA, f"{WANTED} metric selector matchLabels cell", "c1"),
        "wanted under another name": put(HPA, f"{WANTED} metric name", "blockrelay_worker_wanted"),
        "wanted by each": put(HPA, f"{WANTED} target averageValue", "16"),
    },
    "with-gateway-api": {"a route to nowhere": put("HTTPRoute", "spec rules 0 backendRefs 0 port", 8000)},
    "with-valkey": {"sentinels that no policy opens": drop("NetworkPolicy to-valkey")},
    "with-an-ingress": {
        "nowhere": put("Ingress", "spec rules 0 http paths 0 backend service port name", "https"),
        "without tls": drop("Ingress", "spec tls"),
        "buffered": drop("Ingress", f"{INGRESS_ANNOTATIONS}/proxy-buffering"),
        "impatient": drop("Ingress", f"{INGRESS_ANNOTATIONS}/proxy-read-timeout"),
        "small": put("Ingress", f"{INGRESS_ANNOTATIONS}/proxy-body-size", "1m"),
    },
}


def planted(objects: list[Manifest], mistake: Change | tuple[Change, ...]) -> list[Manifest]:
    for change in mistake if isinstance(mistake, tuple) else (mistake,):
        change(objects)
    return objects


@pytest.mark.parametrize("name", SEEN_BY_SCHEMA)
def test_the_schema_finds_what_it_can(render: Render, name: str, tmp_path: Path) -> None:
    assert schema_complaints(planted(render("demo"), SEEN_BY_SCHEMA[name]), "1.37", tmp_path)


@pytest.mark.parametrize("name", SEEN_BY_SCHEMA_OF_OTHERS)
def test_the_types_of_operators_find_what_they_can(render: Render, name: str, tmp_path: Path) -> None:
    assert custom_complaints(planted(render("production"), SEEN_BY_SCHEMA_OF_OTHERS[name]), tmp_path)


@pytest.mark.parametrize(("overlay", "name"), [(at, name) for at, those in FOUND_BY_RULES.items() for name in those])
def test_the_contracts_find_the_rest(render: Render, overlay: str, name: str) -> None:
    assert complaints(planted(render(overlay), FOUND_BY_RULES[overlay][name]))


def test_another_installation_finds_nothing_of_ours(render: Render) -> None:
    """One namespace, two installations: no selector of either finds a pod of the other."""
    ours, theirs = render("demo"), render("another-instance")
    pods = [each for each in theirs if each["kind"] in ("Deployment", "StatefulSet")]
    assert pods and {each["spec"]["template"]["metadata"]["labels"][INSTANCE] for each in pods} == {"another"}
    for first, second in ((ours, theirs), (theirs, ours)):
        for each in first:
            for selector in selectors_of(each):
                assert found_by(selector, first) and not found_by(selector, second), each["metadata"]["name"]
