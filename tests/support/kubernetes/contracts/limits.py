"""What pods may do and take: privileges, processor and memory, and the time for an end."""

import re
from collections.abc import Iterator
from math import isnan, nan

from blockrelay.settings import GatewaySettings
from tests.support.kubernetes.contracts.objects import WORKLOADS, called, containers, kinds, pod_of, settings_of
from tests.support.kubernetes.rendering import Manifest

#: Seconds that a worker, or a gateway, may need behind its drain.
HANDING_OVER_S = 10
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_FACTORS = {
    None: 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip


def confined(objects: list[Manifest]) -> Iterator[str]:
    """Pods are what `restricted` lets in, write nowhere but on volumes, and have no account of the API."""
    accounts = {one["metadata"]["name"]: one for one in kinds(objects, "ServiceAccount")}
    for workload in kinds(objects, *WORKLOADS):
        pod = pod_of(workload)
        said: Manifest = pod.get("securityContext", {})
        if not said.get("runAsNonRoot") or not said.get("runAsUser"):
            yield f"{called(workload)}: it may run as root"
        if said.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{called(workload)}: no seccomp profile"
        account = accounts.get(pod.get("serviceAccountName", ""))
        tokens = [one.get("automountServiceAccountToken") for one in (pod, account or {})]
        if account is None or tokens != [False, False]:
            yield f"{called(workload)}: it has no account of its own, or a token of one"
        for container in containers(workload):
            own: Manifest = container.get("securityContext", {})
            wanted = {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            if own != wanted:
                yield f"{called(workload)}: {container['name']} may do more than {wanted}"


def sized(objects: list[Manifest]) -> Iterator[str]:
    """Quantities can be read, memory is neither promised twice nor unbounded, requests stay below limits."""
    for workload in kinds(objects, *WORKLOADS):
        for container in containers(workload):
            resources: dict[str, dict[str, object]] = container.get("resources", {})
            sizes = {kind: {name: _size(text) for name, text in some.items()} for kind, some in resources.items()}
            for kind, some in sizes.items():
                yield from (
                    f"{called(workload)}: {kind} of {n}: no quantity" for n, size in some.items() if isnan(size)
                )
            requests, limits = (sizes.get(kind, {}) for kind in ("requests", "limits"))
            if not {"cpu", "memory"} <= requests.keys() or "memory" not in limits:
                yield f"{called(workload)}: requests of cpu and memory and a limit of memory are missing"
            elif requests["memory"] != limits["memory"]:
                yield f"{called(workload)}: its memory's request is not its limit"
            for name in requests.keys() & limits.keys():
                if requests[name] > limits[name]:
                    yield f"{called(workload)}: it requests more {name} than its limit"


def ended(objects: list[Manifest]) -> Iterator[str]:
    """What comes before the end has time: the pause of preStop, and the drain of a worker or a gateway. A gateway
    listens until nobody is sent to it any more."""
    for workload in kinds(objects, *WORKLOADS):
        grace = int(pod_of(workload).get("terminationGracePeriodSeconds", 30))
        for container in containers(workload):
            sleeps = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            env = {one["name"]: one.get("value") for one in container.get("env", [])}
            drain = env.get("BLOCKRELAY_DRAIN_S")
            if settings_of(workload) is GatewaySettings:
                drain = env.get("BLOCKRELAY_GATEWAY_DRAIN_S", GatewaySettings.model_fields["gateway_drain_s"].default)
                if not sleeps and not float(env.get("BLOCKRELAY_GATEWAY_LINGER_S", 0)):
                    yield f"{called(workload)}: it listens no more while balancers still send it requests"
            if sleeps >= grace:
                yield f"{called(workload)}: preStop takes all of the {grace} s"
            if drain is not None and sleeps + float(drain) + HANDING_OVER_S > grace:
                yield f"{called(workload)}: a drain of {drain} s does not end within {grace} s"


def _size(text: object) -> float:
    """NaN for what is no quantity."""
    found = _QUANTITY.fullmatch(str(text))
    return nan if found is None else float(found[1]) * _FACTORS[found[2]]
