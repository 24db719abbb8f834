"""Who reaches whom: ports, Services, network policies, and the addresses in the Secrets of services."""

import re
from base64 import b64decode
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

from tests.support.kubernetes.contracts.objects import (
    WORKLOADS,
    called,
    containers,
    found_by,
    kinds,
    labels_of,
    matches,
    of_others,
    ports_of,
    settings_of,
)
from tests.support.kubernetes.rendering import Manifest

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
        rules = [rule for way in ("ingress", "egress") for rule in policy["spec"].get(way, [])]
        peers = [peer for rule in rules for peer in (*rule.get("from", ()), *rule.get("to", ()))]
        selectors = [policy["spec"]["podSelector"], *(peer.get("podSelector", {}) for peer in peers)]
        expressions = [one for selector in selectors for one in selector.get("matchExpressions", [])]
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
            yield from _reaches(objects, client, url)
            for path in (*files, *parse_qs(urlsplit(url).query).get("ssl_ca_certs", [])):
                if path.rpartition("/")[0] not in mounts:
                    yield f"{called(client)}: nothing is mounted where {path} should be"


def _reaches(objects: list[Manifest], client: Manifest, url: str) -> Iterator[str]:
    policies = kinds(objects, "NetworkPolicy")
    there = ways(policies, client, "egress", "to")
    if "+sentinel" in urlsplit(url).scheme:
        if not any(of_others(way.get("podSelector", {})) for way in there):
            yield f"{called(client)}: no policy lets it reach the Sentinels"
        return
    name = urlsplit(url).hostname
    services = [one for one in kinds(objects, "Service") if one["metadata"]["name"] == name]
    servers = [found for one in services for found in found_by({"matchLabels": one["spec"]["selector"]}, objects)]
    if not servers:
        yield f"{called(client)}: nothing serves {name}"
    for server in servers:
        back = ways(policies, server, "ingress", "from")
        for open_to, peer in ((there, server), (back, client)):
            if not any(matches(way["podSelector"], labels_of(peer)) for way in open_to if "podSelector" in way):
                yield f"{called(client)}: no policy lets it reach {called(server)}"
        secure = "--tls-port" in containers(server)[0]["args"]
        if secure != (urlsplit(url).scheme == "rediss"):
            yield f"{called(client)}: {name} {'has' if secure else 'has no'} TLS"


def redis_urls(objects: list[Manifest], workload: Manifest) -> list[str]:
    """Addresses in the Secrets that its containers get."""
    return told(objects, workload, "REDIS_URL")


def told(objects: list[Manifest], workload: Manifest, setting: str) -> list[str]:
    """What stands under names that end in `setting`, in the Secrets that its containers get."""
    secrets = {one["metadata"]["name"]: one for one in kinds(objects, "Secret")}
    named = [source.get("secretRef", {}).get("name") for c in containers(workload) for source in c.get("envFrom", [])]
    data = [secrets[name]["data"] for name in named if name in secrets]
    return [b64decode(value).decode() for some in data for name, value in some.items() if name.endswith(setting)]


def _policies_of(policies: list[Manifest], workload: Manifest) -> list[Manifest]:
    return [policy for policy in policies if matches(policy["spec"]["podSelector"], labels_of(workload))]


def ways(policies: list[Manifest], workload: Manifest, direction: str, peers: str) -> list[Manifest]:
    return [
        peer
        for policy in _policies_of(policies, workload)
        for rule in policy["spec"].get(direction, [])
        for peer in rule.get(peers, [])
    ]
