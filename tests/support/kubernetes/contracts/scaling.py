"""Autoscalers: whom they scale, by what, and whether they may ask for it."""

from base64 import b64decode
from collections.abc import Iterator

from tests.support.kubernetes.contracts.network import servers_at, ways
from tests.support.kubernetes.contracts.objects import called, cell_of, containers, kinds, ports_of
from tests.support.kubernetes.rendering import Manifest
from tests.support.promql import registered

#: What KEDA's `redis` trigger reads of its metadata, and of a TriggerAuthentication (its documentation, 2.20). The API
#: server takes any name here.
TRIGGER = frozenset({
    "address", "host", "port", "username", "addressFromEnv", "hostFromEnv", "portFromEnv", "usernameFromEnv",
    "passwordFromEnv", "listName", "listLength", "activationListLength", "databaseIndex", "enableTLS", "unsafeSsl",
})  # fmt: skip
AUTHENTICATION = frozenset(
    {"address", "host", "port", "username", "password", "tls", "cert", "key", "keyPassword", "ca"}
)
#: The same of the trigger `redis-sentinel`.
SENTINELS_TRIGGER = TRIGGER - {"address", "host", "port", "addressFromEnv", "hostFromEnv", "portFromEnv"} | {
    "addresses", "hosts", "ports", "addressesFromEnv", "hostsFromEnv", "portsFromEnv", "sentinelMaster",
    "sentinelUsernameFromEnv", "sentinelPasswordFromEnv", "sentinelMasterFromEnv",
}  # fmt: skip
SENTINELS_AUTHENTICATION = AUTHENTICATION - {"address", "host", "port"} | {
    "addresses", "hosts", "ports", "sentinelUsername", "sentinelPassword",
}  # fmt: skip
KNOWN = {
    "redis": (TRIGGER, AUTHENTICATION),
    "redis-sentinel": (SENTINELS_TRIGGER, SENTINELS_AUTHENTICATION),
}


def targets_of(objects: list[Manifest], scaler: Manifest) -> list[Manifest]:
    """The Deployment that it scales; none where there is no such one."""
    name = scaler["spec"]["scaleTargetRef"]["name"]
    return [one for one in kinds(objects, "Deployment") if one["metadata"]["name"] == name]


def scaled(objects: list[Manifest]) -> Iterator[str]:
    """An autoscaler has a Deployment for itself, whose number nobody else says."""
    seen: set[str] = set()
    for one in kinds(objects, "ScaledObject", "HorizontalPodAutoscaler"):
        name, found = one["spec"]["scaleTargetRef"]["name"], targets_of(objects, one)
        if not found:
            yield f"{called(one)}: there is no Deployment {name}"
        if found and "replicas" in found[0]["spec"]:
            yield f"{called(one)}: whoever applies {called(found[0])} sets its number back"
        if name in seen:
            yield f"{called(one)}: two scale {name}"
        seen.add(name)
        counts = [one["spec"].get(key) for key in ("minReplicaCount", "maxReplicaCount", "minReplicas", "maxReplicas")]
        least, most = (count for count in counts if count is not None)
        if not 0 <= least < most:
            yield f"{called(one)}: from {least} to {most}"


def by_unfinished_requests(objects: list[Manifest]) -> Iterator[str]:
    """KEDA counts the unfinished requests of the cell that it scales, by parameters that it has, as a user who may."""
    for one in kinds(objects, "ScaledObject"):
        for trigger in one["spec"]["triggers"]:
            told = trigger["metadata"]
            ours = kinds(objects, "StatefulSet")
            kind = "redis-sentinel" if any(s["metadata"]["name"].endswith("-sentinel") for s in ours) else "redis"
            if trigger["type"] != kind or unknown(told, KNOWN[kind][0]):
                strange = unknown(told, KNOWN[kind][0])
                yield f"{called(one)}: the trigger {trigger['type']} is not {kind}, or knows no {strange}"
            if kind == "redis-sentinel" and told.get("sentinelMaster") != "blockrelay":
                yield f"{called(one)}: Sentinels know no master {told.get('sentinelMaster')}"
            for target in targets_of(objects, one):
                if told.get("listName") != f"{{{cell_of(target)}}}:running":
                    yield f"{called(one)}: {told.get('listName')} is not what is unfinished in {cell_of(target)}"
            yield from _authenticated(objects, one, trigger.get("authenticationRef", {}).get("name"), KNOWN[kind][1])


def unknown(names: object, known: frozenset[str]) -> list[str]:
    assert isinstance(names, dict)
    return sorted(set(names) - known)


def _authenticated(objects: list[Manifest], scaler: Manifest, name: str | None, known: frozenset[str]) -> Iterator[str]:
    found = [one for one in kinds(objects, "TriggerAuthentication") if one["metadata"]["name"] == name]
    if not found:
        yield f"{called(scaler)}: there is no TriggerAuthentication {name}"
        return
    told: dict[str, str] = {}
    for source in found[0]["spec"]["secretTargetRef"]:
        if source["parameter"] not in known:
            yield f"{called(found[0])}: the trigger knows no {source['parameter']}"
        secrets = [one for one in kinds(objects, "Secret") if one["metadata"]["name"] == source["name"]]
        if not secrets or source["key"] not in secrets[0]["data"]:
            yield f"{called(found[0])}: there is no {source['key']} in a Secret {source['name']}"
        else:
            told[source["parameter"]] = b64decode(secrets[0]["data"][source["key"]]).decode()
    addresses = told.get("addresses", told.get("address", "")).split(",")
    for host, _, port in (address.rpartition(":") for address in addresses):
        servers = servers_at(objects, host)
        space = scaler["metadata"].get("namespace")
        if not servers or not host.endswith(f".{space}.svc"):
            yield f"{called(found[0])}: {host} is no Service that another namespace finds"
        for server in servers:
            yield from _met(objects, scaler, server, port, secure=told.get("tls") == "enable")
    if "addresses" in told:
        for server in (one for one in kinds(objects, "StatefulSet") if one["metadata"]["name"].endswith("-control")):
            yield from _met(objects, scaler, server, "6379", secure=told.get("tls") == "enable")


def _met(objects: list[Manifest], scaler: Manifest, server: Manifest, port: str, *, secure: bool) -> Iterator[str]:
    if int(port) not in ports_of([server]):
        yield f"{called(scaler)}: {called(server)} has no port {port}"
    if secure != ("--tls-port" in containers(server)[0]["args"]):
        yield f"{called(scaler)}: TLS here and not there"
    peers = ways(kinds(objects, "NetworkPolicy"), server, "ingress", "from")
    if not any("keda" in peer.get("namespaceSelector", {}).get("matchLabels", {}).values() for peer in peers):
        yield f"{called(scaler)}: no policy lets KEDA reach {called(server)}"


def by_workers_wanted(objects: list[Manifest]) -> Iterator[str]:
    """A HorizontalPodAutoscaler takes a number of workers that schedulers tell, of the cell that it scales."""
    for one in kinds(objects, "HorizontalPodAutoscaler"):
        cells = {cell_of(target) for target in targets_of(objects, one)}
        for metric in one["spec"]["metrics"]:
            name = metric["external"]["metric"]["name"]
            labels = metric["external"]["metric"]["selector"]["matchLabels"]
            if not labels.keys() <= registered().get(name, set()):
                yield f"{called(one)}: no service tells {name} with the labels {sorted(labels)}"
            if {labels.get("cell")} != cells:
                yield f"{called(one)}: it scales {cells} by what {labels.get('cell')} wants"
            if metric["external"]["target"] != {"type": "AverageValue", "averageValue": "1"}:
                yield f"{called(one)}: {name} is the number itself, no load of each"
