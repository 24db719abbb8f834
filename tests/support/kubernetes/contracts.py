"""What must hold among rendered manifests, and between them and the code: what no schema of the API can see.

Each rule takes all objects of an overlay and yields complaints, a sentence each.
"""

import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isnan, nan
from typing import Any

from blockrelay.settings import GatewaySettings, SchedulerSettings, Settings, WorkerSettings
from tests.support.kubernetes.rendering import Manifest
from tests.support.project import ROOT

Rule = Callable[[list[Manifest]], Iterator[str]]

#: Kinds and the versions of the API that have them today.
API_VERSIONS = {
    "Namespace": "v1", "ServiceAccount": "v1", "Secret": "v1", "ConfigMap": "v1", "Service": "v1",
    "Deployment": "apps/v1", "StatefulSet": "apps/v1", "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}  # fmt: skip
WORKLOADS = ("Deployment", "StatefulSet")
#: The image of ours -> the settings of its service, its target in deploy/Dockerfile, and the paths that it answers.
IMAGES: Mapping[str, tuple[type[Settings], str, frozenset[str]]] = {
    "blockrelay/gateway": (GatewaySettings, "gateway", frozenset({"/livez", "/readyz", "/readyz?for=accepting"})),
    "blockrelay/scheduler": (SchedulerSettings, "scheduler", frozenset({"/livez", "/readyz"})),
    "blockrelay/worker": (WorkerSettings, "worker", frozenset({"/livez", "/readyz"})),
}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
#: Seconds that a worker may need behind its drain.
HANDING_OVER_S = 10
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_FACTORS = {
    None: 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip


def complaints(objects: list[Manifest]) -> list[str]:
    """Of all rules."""
    return [said for rule in RULES for said in rule(objects)]


def kinds(objects: Iterable[Manifest], *wanted: str) -> list[Manifest]:
    return [one for one in objects if one["kind"] in wanted]


def pod_of(workload: Manifest) -> Manifest:
    return workload["spec"]["template"]["spec"]


def containers(workload: Manifest) -> list[Manifest]:
    return [*pod_of(workload).get("initContainers", []), *pod_of(workload)["containers"]]


def called(one: Manifest) -> str:
    return f"{one['kind']} {one['metadata'].get('name')}"


def of_today(objects: list[Manifest]) -> Iterator[str]:
    """Every kind is known, in the version of the API that has it."""
    for one in objects:
        if API_VERSIONS.get(one["kind"]) != one["apiVersion"]:
            yield f"{called(one)}: apiVersion {one['apiVersion']} is not {API_VERSIONS.get(one['kind'])}"


def named(objects: list[Manifest]) -> Iterator[str]:
    """Names are legal and, within a kind, distinct."""
    seen: set[str] = set()
    for one in objects:
        if not _NAME.fullmatch(str(one["metadata"].get("name"))):
            yield f"{called(one)}: its name is none"
        if called(one) in seen:
            yield f"{called(one)} is there twice"
        seen.add(called(one))


def in_one_namespace(objects: list[Manifest]) -> Iterator[str]:
    """All objects are in the overlay's one namespace, which refuses what is not restricted."""
    spaces = kinds(objects, "Namespace")
    names = {one["metadata"]["name"] for one in spaces}
    if len(names) != 1:
        yield f"there are {len(names)} namespaces"
    for one in spaces:
        if one["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"{called(one)} does not enforce restricted pods"
    for one in objects:
        if one["kind"] != "Namespace" and one["metadata"].get("namespace") not in names:
            yield f"{called(one)} is in namespace {one['metadata'].get('namespace')}"


def selected(objects: list[Manifest]) -> Iterator[str]:
    """Selectors find what they are for."""
    workloads = kinds(objects, *WORKLOADS)
    for one in workloads:
        if not _matches(one["spec"]["selector"], _labels(one)):
            yield f"{called(one)}: its selector does not find its own pods"
    for one in kinds(objects, "Service"):
        if not [w for w in workloads if _matches({"matchLabels": one["spec"]["selector"]}, _labels(w))]:
            yield f"{called(one)} finds no pods"
    for one in kinds(objects, "NetworkPolicy"):
        if not [w for w in workloads if _matches(one["spec"]["podSelector"], _labels(w))]:
            yield f"{called(one)} finds no pods"
    for workload in workloads:
        budgets = [
            b for b in kinds(objects, "PodDisruptionBudget") if _matches(b["spec"]["selector"], _labels(workload))
        ]
        if len(budgets) != 1:
            yield f"{called(workload)} has {len(budgets)} disruption budgets"


def disrupted(objects: list[Manifest]) -> Iterator[str]:
    """A budget says one number, and nodes can be drained."""
    for one in kinds(objects, "PodDisruptionBudget"):
        if ("minAvailable" in one["spec"]) == ("maxUnavailable" in one["spec"]):
            yield f"{called(one)}: it has minAvailable and maxUnavailable, or neither"
        for workload in kinds(objects, *WORKLOADS):
            if _matches(one["spec"]["selector"], _labels(workload)):
                least = one["spec"].get("minAvailable", 0)
                spare = one["spec"].get("maxUnavailable", workload["spec"]["replicas"] - least)
                if spare < 1:
                    yield f"{called(one)}: no pod may go, and no node can be drained"
        if one["spec"].get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield f"{called(one)}: a pod that is ill keeps its node from being drained"


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
        known = _ports_of(w for w in workloads if _matches({"matchLabels": one["spec"]["selector"]}, _labels(w)))
        for port in one["spec"]["ports"]:
            if port.get("targetPort", port["port"]) not in known:
                yield f"{called(one)}: no pod has port {port.get('targetPort', port['port'])}"
    for one in kinds(objects, "NetworkPolicy"):
        for rule in one["spec"].get("ingress", []):
            known = _ports_of(w for w in workloads if _matches(one["spec"]["podSelector"], _labels(w)))
            asked = [port["port"] for port in rule.get("ports", [])]
            yield from (f"{called(one)}: no pod has port {port}" for port in asked if port not in known)
        for rule in one["spec"].get("egress", []):
            yield from _egress(one, rule, workloads)


def _egress(policy: Manifest, rule: Manifest, workloads: list[Manifest]) -> Iterator[str]:
    for to in rule["to"]:
        if "namespaceSelector" in to:
            continue  # pods of others
        found = [w for w in workloads if _matches(to["podSelector"], _labels(w))]
        if not found:
            yield f"{called(policy)}: nobody is there to be spoken to"
        for port in rule.get("ports", []):
            if port["port"] not in _ports_of(found):
                yield f"{called(policy)}: no pod has port {port['port']}"


def probed(objects: list[Manifest]) -> Iterator[str]:
    """Every container has its probes, on ports that it has and paths that its service answers."""
    for workload in kinds(objects, *WORKLOADS):
        for container in pod_of(workload)["containers"]:
            known = _ports_of([workload])
            for name in PROBES:
                probe = container.get(name)
                if probe is None:
                    yield f"{called(workload)}: no {name}"
                    continue
                asked = probe.get("httpGet") or probe.get("tcpSocket")
                if asked is not None and asked["port"] not in known:
                    yield f"{called(workload)}: {name}: no port {asked['port']}"
                ours = IMAGES.get(_image(container)[0])
                if "httpGet" in probe and (ours is None or probe["httpGet"]["path"] not in ours[2]):
                    yield f"{called(workload)}: {name}: nobody answers {probe['httpGet']['path']}"


def configured(objects: list[Manifest]) -> Iterator[str]:
    """Services get settings that they have, from Secrets that are there, and nothing that only looks like one."""
    both = kinds(objects, "Secret", "ConfigMap")
    given = {(one["kind"][0].lower() + one["kind"][1:], one["metadata"]["name"]): one for one in both}
    for workload in kinds(objects, *WORKLOADS):
        if pod_of(workload).get("enableServiceLinks") is not False:
            yield f"{called(workload)}: names of Services become variables, and BLOCKRELAY_... of them are refused"
        for container in containers(workload):
            names = [one["name"] for one in container.get("env", [])]
            for source in container.get("envFrom", []):
                ((kind, told),) = source.items()
                found = given.get((kind.removesuffix("Ref"), told["name"]))
                if found is None:
                    yield f"{called(workload)}: there is no {kind.removesuffix('Ref')} {told['name']}"
                else:
                    names += found.get("data", {})
            ours = IMAGES.get(_image(container)[0])
            known = {f"BLOCKRELAY_{field.upper()}" for field in ours[0].model_fields} if ours else set[str]()
            yield from (f"{called(workload)}: its service has no setting {name}" for name in names if name not in known)


def reached(objects: list[Manifest]) -> Iterator[str]:
    """Nobody reaches anybody but by a policy, by which services reach DNS and the Redis servers of their Secrets."""
    policies, workloads = kinds(objects, "NetworkPolicy"), kinds(objects, *WORKLOADS)
    for workload in workloads:
        closed = {
            way
            for policy in policies
            if _matches(policy["spec"]["podSelector"], _labels(workload))
            for way in policy["spec"]["policyTypes"]
        }
        if closed != {"Ingress", "Egress"}:
            yield f"{called(workload)}: no policy closes {' and '.join(sorted({'Ingress', 'Egress'} - closed))}"
    for policy in policies:
        rules = [rule for way in ("ingress", "egress") for rule in policy["spec"].get(way, [])]
        peers = [peer for rule in rules for peer in (*rule.get("from", ()), *rule.get("to", ()))]
        selectors = [policy["spec"]["podSelector"], *(peer.get("podSelector", {}) for peer in peers)]
        expressions = [one for selector in selectors for one in selector.get("matchExpressions", [])]
        for value in (value for expression in expressions for value in expression["values"]):
            if value not in {_labels(workload).get("app.kubernetes.io/component") for workload in workloads}:
                yield f"{called(policy)}: nothing of ours is called {value}"
    for client in (one for one in workloads if _settings_of(one) is not None):
        if not any("namespaceSelector" in to for to in _ways(policies, client, "egress", "to")):
            yield f"{called(client)}: no way to DNS"
        for url in _redis_urls(objects, client):
            name = url.rpartition("@")[2].removeprefix("redis://").partition(":")[0]
            services = [one for one in kinds(objects, "Service") if one["metadata"]["name"] == name]
            servers = [
                w for w in workloads for s in services if _matches({"matchLabels": s["spec"]["selector"]}, _labels(w))
            ]
            if not servers:
                yield f"{called(client)}: nothing serves {name}"
            for server in servers:
                there = _ways(policies, client, "egress", "to")
                back = _ways(policies, server, "ingress", "from")
                for ways, peer in ((there, server), (back, client)):
                    if not any(_matches(way["podSelector"], _labels(peer)) for way in ways if "podSelector" in way):
                        yield f"{called(client)}: no policy lets it reach {called(server)}"


def _ways(policies: list[Manifest], workload: Manifest, direction: str, peers: str) -> list[Manifest]:
    return [
        peer
        for policy in policies
        if _matches(policy["spec"]["podSelector"], _labels(workload))
        for rule in policy["spec"].get(direction, [])
        for peer in rule.get(peers, [])
    ]


def _redis_urls(objects: list[Manifest], workload: Manifest) -> list[str]:
    secrets = {one["metadata"]["name"]: one for one in kinds(objects, "Secret")}
    named = [source.get("secretRef", {}).get("name") for c in containers(workload) for source in c.get("envFrom", [])]
    data = [secrets[name]["data"] for name in named if name in secrets]
    return [b64decode(value).decode() for some in data for name, value in some.items() if name.endswith("REDIS_URL")]


def _settings_of(workload: Manifest) -> type[Settings] | None:
    return next((IMAGES[name][0] for c in containers(workload) if (name := _image(c)[0]) in IMAGES), None)


def imaged(objects: list[Manifest]) -> Iterator[str]:
    """Images have a version, and those of ours run as the user and on the port that their Dockerfile says."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for workload in kinds(objects, *WORKLOADS):
        for container in containers(workload):
            name, tag = _image(container)
            if not name or not tag:
                yield f"{called(workload)}: {container['image']!r} is no image with a version"
            if name not in IMAGES:
                continue
            target = dockerfile.partition(f"AS {IMAGES[name][1]}\n")[2]
            (port,) = re.findall(r"^EXPOSE (\d+)", target.partition("\nFROM ")[0], re.MULTILINE)
            if [one["containerPort"] for one in container["ports"]] != [int(port)]:
                yield f"{called(workload)}: its image listens on {port}"
            user = pod_of(workload)["securityContext"].get("runAsUser")
            if f"USER {user}:" not in dockerfile:
                yield f"{called(workload)}: its image has no user {user}"


def mounted(objects: list[Manifest]) -> Iterator[str]:
    """Mounts have volumes and volumes mounts, and what volumes show is there; a single writer is single."""
    shown = {one["metadata"]["name"] for one in kinds(objects, "ConfigMap")}
    for workload in kinds(objects, *WORKLOADS):
        claims = workload["spec"].get("volumeClaimTemplates", [])
        volumes = {one["name"] for one in pod_of(workload).get("volumes", [])}
        volumes |= {one["metadata"]["name"] for one in claims}
        for volume in pod_of(workload).get("volumes", []):
            if "configMap" in volume and volume["configMap"]["name"] not in shown:
                yield f"{called(workload)}: there is no ConfigMap {volume['configMap']['name']}"
        mounts = {mount["name"] for container in containers(workload) for mount in container.get("volumeMounts", [])}
        yield from (f"{called(workload)}: there is no volume {name}" for name in sorted(mounts - volumes))
        yield from (f"{called(workload)}: nobody mounts volume {name}" for name in sorted(volumes - mounts))
        for claim in claims:
            modes = claim["spec"]["accessModes"]
            if "ReadWriteOncePod" in modes and len(modes) > 1:
                yield f"{called(workload)}: ReadWriteOncePod stands alone"
            if "fsGroup" not in pod_of(workload).get("securityContext", {}):
                yield f"{called(workload)}: without fsGroup its user cannot write on its volume"


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
    """What comes before the end has time: the pause of preStop, and a worker's drain."""
    for workload in kinds(objects, *WORKLOADS):
        grace = int(pod_of(workload).get("terminationGracePeriodSeconds", 30))
        for container in containers(workload):
            sleeps = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            drain = {one["name"]: one.get("value") for one in container.get("env", [])}.get("BLOCKRELAY_DRAIN_S")
            if sleeps >= grace:
                yield f"{called(workload)}: preStop takes all of the {grace} s"
            if drain is not None and float(drain) + HANDING_OVER_S > grace:
                yield f"{called(workload)}: a drain of {drain} s does not end within {grace} s"


RULES: tuple[Rule, ...] = (
    of_today, named, in_one_namespace, selected, disrupted, ports, probed, configured, reached, imaged, mounted,
    confined, sized, ended,
)  # fmt: skip


def _labels(workload: Manifest) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Of matchLabels, and of matchExpressions with In."""
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    expressions: list[Manifest] = selector.get("matchExpressions", [])
    return all(labels.get(name) == value for name, value in wanted.items()) and all(
        one["operator"] == "In" and labels.get(one["key"]) in one["values"] for one in expressions
    )


def _ports_of(workloads: Iterable[Manifest]) -> set[object]:
    """By name and by number."""
    found = [port for w in workloads for container in containers(w) for port in container.get("ports", [])]
    return {port["name"] for port in found} | {port["containerPort"] for port in found}


def _image(container: Manifest) -> tuple[str, str]:
    """Its name, of the last two parts (a registry may stand before them), and its version."""
    name, _, tag = str(container.get("image", "")).rpartition(":")
    return "/".join(name.split("/")[-2:]), tag


def _size(text: object) -> float:
    """NaN for what is no quantity."""
    found = _QUANTITY.fullmatch(str(text))
    return nan if found is None else float(found[1]) * _FACTORS[found[2]]
