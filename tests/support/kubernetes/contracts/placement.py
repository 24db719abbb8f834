"""Where pods go and how long they may take: hosts and zones, who is moved away first, and deadlines of a roll-out."""

from collections.abc import Iterator

from tests.support.kubernetes.contracts.objects import (
    WORKLOADS,
    apart,
    called,
    kinds,
    pod_of,
    settings_of,
)
from tests.support.kubernetes.rendering import Manifest

HOST, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
#: Kubernetes' own, in seconds.
PROGRESS_S = 600
#: What comes before the first probe: a node, and an image that is pulled.
PULLING_S = 120


def spread(objects: list[Manifest]) -> Iterator[str]:
    """Pods of which there are several are on several hosts, in several zones."""
    for workload in kinds(objects, *WORKLOADS):
        if settings_of(workload) is None and workload["spec"].get("replicas", 1) < 2:
            continue
        over = {each["topologyKey"] for each in pod_of(workload).get("topologySpreadConstraints", [])}
        over |= {each["topologyKey"] for each in apart(workload)}
        yield from (f"{called(workload)}: all of it may be on one {key}" for key in sorted({HOST, ZONE} - over))


def prioritised(objects: list[Manifest]) -> Iterator[str]:
    """Finds workloads without a priority beside others that have one, and those whose priority is above Redis'."""
    values = {one["metadata"]["name"]: int(one["value"]) for one in kinds(objects, "PriorityClass")}
    workloads = kinds(objects, *WORKLOADS)
    named = {called(one): pod_of(one).get("priorityClassName") for one in workloads}
    if not values and not any(named.values()):
        return
    for one in workloads:
        if named[called(one)] not in values:
            yield f"{called(one)}: there is no PriorityClass {named[called(one)]}"
    of_services = [values.get(named[called(one)] or "", 0) for one in workloads if settings_of(one) is not None]
    for one in workloads:
        is_redis = one["metadata"]["name"].endswith(("redis-control", "redis-payload", "sentinel"))
        if is_redis and values.get(named[called(one)] or "", 0) <= max(of_services):
            yield f"{called(one)}: services push it off a full node"


def deadlined(objects: list[Manifest]) -> Iterator[str]:
    """A roll-out waits for longer than a start may take."""
    for workload in kinds(objects, "Deployment"):
        deadline = workload["spec"].get("progressDeadlineSeconds", PROGRESS_S)
        for container in pod_of(workload)["containers"]:
            probe = container.get("startupProbe", {})
            allowed = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
            if allowed + PULLING_S > deadline:
                yield f"{called(workload)}: it may take {allowed} s to start, and is given up after {deadline} s"
