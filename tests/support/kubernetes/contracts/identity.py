"""What objects are called and where they are, and whether selectors and budgets find whom they are for."""

import re
from collections.abc import Iterator

from blockrelay import __version__
from tests.support.kubernetes.contracts.objects import (
    INSTANCE,
    OF_THE_CLUSTER,
    WORKLOADS,
    called,
    found_by,
    kinds,
    labels_of,
    matches,
    of_others,
    selectors_of,
)
from tests.support.kubernetes.rendering import Manifest

#: Kinds and the versions of the API that have them today.
API_VERSIONS = {
    "Namespace": "v1", "ServiceAccount": "v1", "Secret": "v1", "ConfigMap": "v1", "Service": "v1",
    "PersistentVolumeClaim": "v1", "Deployment": "apps/v1", "StatefulSet": "apps/v1",
    "PodDisruptionBudget": "policy/v1", "NetworkPolicy": "networking.k8s.io/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2", "PriorityClass": "scheduling.k8s.io/v1",
    "Ingress": "networking.k8s.io/v1",
    "ScaledObject": "keda.sh/v1alpha1", "TriggerAuthentication": "keda.sh/v1alpha1",
    "PodMonitor": "monitoring.coreos.com/v1", "PrometheusRule": "monitoring.coreos.com/v1",
    "Gateway": "gateway.networking.k8s.io/v1", "HTTPRoute": "gateway.networking.k8s.io/v1",
}  # fmt: skip
#: Every pod has them; the component and the cell say which one it is.
LABELS = ("name", "instance", "part-of", "component")
_VERSION = "app.kubernetes.io/version"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def of_today(objects: list[Manifest]) -> Iterator[str]:
    """Every kind is known, in the version of the API that has it."""
    for one in objects:
        if API_VERSIONS.get(one["kind"]) != one["apiVersion"]:
            yield f"{called(one)}: apiVersion {one['apiVersion']} is not {API_VERSIONS.get(one['kind'])}"


def in_namespaces(objects: list[Manifest]) -> Iterator[str]:
    """All objects are in namespaces of the overlay, which refuse what is not restricted."""
    spaces = kinds(objects, "Namespace")
    names = {one["metadata"]["name"] for one in spaces}
    if not names:
        yield "there is no namespace"
    for one in spaces:
        if one["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"{called(one)} does not enforce restricted pods"
    for one in objects:
        if (one["kind"] in OF_THE_CLUSTER) != ("namespace" not in one["metadata"]):
            yield f"{called(one)} is in namespace {one['metadata'].get('namespace')}"
        elif one["kind"] not in OF_THE_CLUSTER and one["metadata"]["namespace"] not in names:
            yield f"{called(one)} is in namespace {one['metadata']['namespace']}"


def named(objects: list[Manifest]) -> Iterator[str]:
    """Names are legal and, within a kind, distinct."""
    seen: set[str] = set()
    for one in objects:
        if not _NAME.fullmatch(str(one["metadata"].get("name"))):
            yield f"{called(one)}: its name is none"
        if called(one) in seen:
            yield f"{called(one)} is there twice"
        seen.add(called(one))


def labelled(objects: list[Manifest]) -> Iterator[str]:
    """Pods say what they are, and of which cell, the same for all; workloads say of which release."""
    cells: set[str | None] = set()
    for workload in kinds(objects, *WORKLOADS):
        labels = labels_of(workload)
        missing = [name for name in LABELS if f"app.kubernetes.io/{name}" not in labels]
        yield from (f"{called(workload)}: its pods have no label {name}" for name in missing)
        if workload["metadata"].get("labels", {}).get(_VERSION) != __version__:
            yield f"{called(workload)}: its version is not {__version__}"
        cells.add(labels.get("blockrelay.io/cell"))
    if len(cells) != 1 or None in cells:
        yield f"pods of one namespace are of the cells {cells}"


def lasting(objects: list[Manifest]) -> Iterator[str]:
    """The next release replaces no pod by its number alone, and changes no claim, which an API server refuses."""
    for workload in kinds(objects, *WORKLOADS):
        if _VERSION in labels_of(workload):
            yield f"{called(workload)}: each release replaces its pods, since they have the label {_VERSION}"
        for claim in workload["spec"].get("volumeClaimTemplates", []):
            if _VERSION in claim["metadata"].get("labels", {}):
                yield f"{called(workload)}: no later release can be applied, since its claims have the label {_VERSION}"


def instanced(objects: list[Manifest]) -> Iterator[str]:
    """Nothing that finds our pods finds those of another installation in the same namespace."""
    workloads = kinds(objects, *WORKLOADS)
    instances = {labels_of(workload).get(INSTANCE) for workload in workloads}
    if len(instances) != 1:
        yield f"pods of one installation are of the instances {instances}"
    strangers = [{**labels_of(workload), INSTANCE: "of somebody else"} for workload in workloads]
    for one in objects:
        if any(matches(selector, labels) for selector in selectors_of(one) for labels in strangers):
            yield f"{called(one)} takes pods of another installation for ours: a selector has no {INSTANCE}"


def selected(objects: list[Manifest]) -> Iterator[str]:
    """Selectors find what they are for."""
    workloads = kinds(objects, *WORKLOADS)
    for one in workloads:
        if not matches(one["spec"]["selector"], labels_of(one)):
            yield f"{called(one)}: its selector does not find its own pods"
    for one in kinds(objects, "Service"):
        if not found_by({"matchLabels": one["spec"]["selector"]}, workloads):
            yield f"{called(one)} finds no pods"
    for one in kinds(objects, "NetworkPolicy"):
        if not of_others(one["spec"]["podSelector"]) and not found_by(one["spec"]["podSelector"], workloads):
            yield f"{called(one)} finds no pods"
    for workload in workloads:
        budgets = [
            one
            for one in kinds(objects, "PodDisruptionBudget")
            if matches(one["spec"]["selector"], labels_of(workload))
        ]
        if len(budgets) != 1:
            yield f"{called(workload)} has {len(budgets)} disruption budgets"


def disrupted(objects: list[Manifest]) -> Iterator[str]:
    """A budget says one number, and nodes can be drained."""
    for one in kinds(objects, "PodDisruptionBudget"):
        if ("minAvailable" in one["spec"]) == ("maxUnavailable" in one["spec"]):
            yield f"{called(one)}: it has minAvailable and maxUnavailable, or neither"
        for workload in found_by(one["spec"]["selector"], objects):
            least = one["spec"].get("minAvailable", 0)
            spare = one["spec"].get("maxUnavailable", workload["spec"].get("replicas", 1) - least)
            if spare < 1:
                yield f"{called(one)}: no pod may go, and no node can be drained"
        if one["spec"].get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield f"{called(one)}: a pod that is ill keeps its node from being drained"
