"""Who reaches whom: ports, Services, network policies, and the addresses in the Secrets of services."""

import re
from base64 import b64decode
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

from blockrelay.settings import GatewaySettings
from tests.support.kubernetes.contracts.objects import (
    WORKLOADS,
    called,
    containers,
    found_by,
    kinds,
    labels_of,
    matches,
    of_others,
    peers_of,
    ports_of,
    settings_of,
)
from tests.support.kubernetes.rendering import Manifest

#: A gateway's sockets may be silent for as long as their clients are.
LONGEST_SILENCE_S = 600
_BODY = f"{GatewaySettings.model_fields['max_body_bytes'].default >> 20}m"
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")


def ports(objects: list[Manifest]) -> Iterator[str]:
    """Ports are numbers of ports, their names are legal, and whoever names one finds it."""
    workloads = kinds(objects, *WORKLOADS)
    for workload in workloads:
        for container in containers(workload):
            for port in container.get("ports", []):
                if not 0 < int(port["containerPort"]) < 65536:
                    yield f"{called(workload)}: {port['containerPort']} is no port"
                if not _PORT_NAME.fullmatch(port["name"]):
                    yield f"{called(workload)}: {port['name']} is no name of a port"
    for one in kinds(objects, "Service"):
        known = ports_of(found_by({"matchLabels": one["spec"]["selector"]}, workloads))
        for port in one["spec"]["ports"]:
            if port.get("targetPort", port["port"]) not in known:
                yield f"{called(one)}: no pod has port {port.get('targetPort', port['port'])}"
    for one in kinds(objects, "NetworkPolicy"):
        for rule in one["spec"].get("ingress", []):
            if not of_others(one["spec"]["podSelector"]):
                known = ports_of(found_by(one["spec"]["podSelector"], workloads))
                asked = [port["port"] for port in rule.get("ports", [])]
                yield from (f"{called(one)}: no pod has port {port}" for port in asked if port not in known)
        for rule in one["spec"].get("egress", []):
            yield from _egress(one, rule, workloads)
    for one in kinds(objects, "HTTPRoute"):
        services = {service["metadata"]["name"]: service for service in kinds(objects, "Service")}
        for backend in (backend for rule in one["spec"]["rules"] for backend in rule["backendRefs"]):
            offered = services.get(backend["name"], {"spec": {"ports": []}})["spec"]["ports"]
            if backend["port"] not in {port["port"] for port in offered}:
                yield f"{called(one)}: no Service {backend['name']} has port {backend['port']}"


def _egress(policy: Manifest, rule: Manifest, workloads: list[Manifest]) -> Iterator[str]:
    for to in rule["to"]:
        if "namespaceSelector" in to or of_others(to["podSelector"]):
            continue
        found = found_by(to["podSelector"], workloads)
        if not found:
            yield f"{called(policy)}: nobody is there to be spoken to"
        for port in rule.get("ports", []):
            if port["port"] not in ports_of(found):
                yield f"{called(policy)}: no pod has port {port['port']}"


def closed(objects: list[Manifest]) -> Iterator[str]:
    """Nobody reaches anybody but by a policy, and policies speak of those that are there."""
    policies, workloads = kinds(objects, "NetworkPolicy"), kinds(objects, *WORKLOADS)
    for workload in workloads:
        shut = {way for policy in _policies_of(policies, workload) for way in policy["spec"]["policyTypes"]}
        if shut != {"Ingress", "Egress"}:
            yield f"{called(workload)}: no policy closes {' and '.join(sorted({'Ingress', 'Egress'} - shut))}"
    for policy in policies:
        selectors = [policy["spec"]["podSelector"], *(peer.get("podSelector", {}) for peer in peers_of(policy))]
        found = [one for selector in selectors for one in selector.get("matchExpressions", [])]
        expressions = [one for one in found if one["key"] == "app.kubernetes.io/component"]
        for value in (value for expression in expressions for value in expression["values"]):
            if value not in {labels_of(workload).get("app.kubernetes.io/component") for workload in workloads}:
                yield f"{called(policy)}: nothing of ours is called {value}"


def reached(objects: list[Manifest]) -> Iterator[str]:
    """Services reach DNS and the Redis servers of their Secrets, have the certificate to believe of those with TLS, and
    the password that they are to come with."""
    policies = kinds(objects, "NetworkPolicy")
    for client in (one for one in kinds(objects, *WORKLOADS) if settings_of(one) is not None):
        if not any("namespaceSelector" in to for to in ways(policies, client, "egress", "to")):
            yield f"{called(client)}: no way to DNS"
        urls = redis_urls(objects, client)
        if len(urls) != 2:
            yield f"{called(client)}: it has {len(urls)} addresses of Redis servers, not 2"
        mounts = {mount["mountPath"] for one in containers(client) for mount in one.get("volumeMounts", [])}
        files = told(objects, client, "REDIS_PASSWORD_FILE")
        for url in urls:
            yield from reaches(objects, client, url)
            for path in (*files, *parse_qs(urlsplit(url).query).get("ssl_ca_certs", [])):
                if path.rpartition("/")[0] not in mounts:
                    yield f"{called(client)}: nothing is mounted where {path} should be"


def reaches(objects: list[Manifest], client: Manifest, url: str) -> Iterator[str]:
    """The servers of the address are there, speak as it says, and policies let the client come."""
    parts = urlsplit(url)
    hosts = [host.partition(":")[0] for host in parts.netloc.rpartition("@")[2].split(",")]
    if "+sentinel" in parts.scheme:
        there = ways(kinds(objects, "NetworkPolicy"), client, "egress", "to")
        if any(of_others(way.get("podSelector", {})) for way in there):
            return
        for server in (one for one in kinds(objects, *WORKLOADS) if one["metadata"]["name"].endswith("redis-control")):
            yield from _meets(objects, client, server, secure=parts.scheme.startswith("rediss"))
    for host in hosts:
        servers = servers_at(objects, host)
        if not servers:
            yield f"{called(client)}: nothing serves {host}"
        for server in servers:
            yield from _meets(objects, client, server, secure=parts.scheme.startswith("rediss"))


def servers_at(objects: list[Manifest], host: str) -> list[Manifest]:
    """Whose pods this name stands for: that of a Service, or that of one pod of a Service without an address."""
    first, *rest = host.split(".")
    for one in kinds(objects, "Service"):
        found = found_by({"matchLabels": one["spec"]["selector"]}, objects)
        headless = one["spec"].get("clusterIP") == "None"
        if one["metadata"]["name"] == first and not headless:
            return found
        if headless and rest and one["metadata"]["name"] == rest[0]:
            return [
                server for server in found if first in pods_of(server) and server["spec"].get("serviceName") == rest[0]
            ]
    return []


def pods_of(workload: Manifest) -> list[str]:
    """Names of the pods of a StatefulSet."""
    return [f"{workload['metadata']['name']}-{number}" for number in range(workload["spec"].get("replicas", 1))]


def _meets(objects: list[Manifest], client: Manifest, server: Manifest, *, secure: bool) -> Iterator[str]:
    policies = kinds(objects, "NetworkPolicy")
    there, back = ways(policies, client, "egress", "to"), ways(policies, server, "ingress", "from")
    for open_to, peer in ((there, server), (back, client)):
        if not any(matches(way["podSelector"], labels_of(peer)) for way in open_to if "podSelector" in way):
            yield f"{called(client)}: no policy lets it reach {called(server)}"
    if secure != ("--tls-port" in containers(server)[0]["args"]):
        yield f"{called(client)}: {called(server)} has {'no TLS' if secure else 'TLS'}"


def redis_urls(objects: list[Manifest], workload: Manifest) -> list[str]:
    """Addresses in the Secrets that its containers get."""
    return told(objects, workload, "REDIS_URL")


def told(objects: list[Manifest], workload: Manifest, setting: str) -> list[str]:
    """What stands under names that end in `setting`, in the Secrets that its containers get."""
    secrets = {one["metadata"]["name"]: one for one in kinds(objects, "Secret")}
    named = [source.get("secretRef", {}).get("name") for c in containers(workload) for source in c.get("envFrom", [])]
    data = [secrets[name]["data"] for name in named if name in secrets]
    return [b64decode(value).decode() for some in data for name, value in some.items() if name.endswith(setting)]


def ingress(objects: list[Manifest]) -> Iterator[str]:
    """An Ingress ends at a port that is there, over TLS, and lets a stream through as it comes."""
    services = {one["metadata"]["name"]: one for one in kinds(objects, "Service")}
    for one in kinds(objects, "Ingress"):
        hosts = {rule["host"] for rule in one["spec"]["rules"]}
        covered = {host for tls in one["spec"].get("tls", []) for host in tls["hosts"]}
        yield from (f"{called(one)}: {host} is served without TLS" for host in sorted(hosts - covered))
        for backend in (p["backend"]["service"] for rule in one["spec"]["rules"] for p in rule["http"]["paths"]):
            offered = services.get(backend["name"], {"spec": {"ports": []}})["spec"]["ports"]
            if backend["port"].get("name") not in {port["name"] for port in offered}:
                yield f"{called(one)}: no Service {backend['name']} has port {backend['port']}"
        told = {name.partition("/")[2]: value for name, value in one["metadata"].get("annotations", {}).items()}
        for what in ("proxy-buffering", "proxy-request-buffering"):
            if told.get(what) != "off":
                yield f"{called(one)}: {what} is on: no token comes before the last one"
        for what in ("proxy-read-timeout", "proxy-send-timeout"):
            if int(told.get(what, 60)) < LONGEST_SILENCE_S:
                yield f"{called(one)}: {what} breaks a WebSocket that waits"
        if told.get("proxy-body-size") != _BODY:
            yield f"{called(one)}: proxy-body-size is not BLOCKRELAY_MAX_BODY_BYTES"


def callers(objects: list[Manifest], workload: Manifest, port: object) -> list[Manifest] | None:
    """Who may come to this port of its pods; None: everybody."""
    found: list[Manifest] = []
    for policy in _policies_of(kinds(objects, "NetworkPolicy"), workload):
        for rule in policy["spec"].get("ingress", []):
            named = [one["port"] for one in rule.get("ports", [])]
            if not named or port in named:
                if "from" not in rule:
                    return None
                found += rule["from"]
    return found


def _policies_of(policies: list[Manifest], workload: Manifest) -> list[Manifest]:
    return [policy for policy in policies if matches(policy["spec"]["podSelector"], labels_of(workload))]


def ways(policies: list[Manifest], workload: Manifest, direction: str, peers: str) -> list[Manifest]:
    return [
        peer
        for policy in _policies_of(policies, workload)
        for rule in policy["spec"].get(direction, [])
        for peer in rule.get(peers, [])
    ]
