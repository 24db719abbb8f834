"""What containers are given: probes, settings, images and volumes."""

import re
from collections.abc import Iterator

from tests.support.kubernetes.contracts.objects import (
    IMAGES,
    WORKLOADS,
    called,
    containers,
    environment,
    image_of,
    kinds,
    of_other_image,
    paths_of,
    pod_of,
    ports_of,
    settings_of,
)
from tests.support.kubernetes.rendering import Manifest
from tests.support.project import ROOT

#: What kustomize puts behind a name that goes by the content.
_OF_CONTENT = re.compile(r"-[2456789bcdfghkmt]{10}$")
_DIGEST = re.compile("sha256:[0-9a-f]{64}")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def probed(objects: list[Manifest]) -> Iterator[str]:
    """Every container has its probes, on ports that it has and paths that its service answers."""
    for workload in kinds(objects, *WORKLOADS):
        for container in pod_of(workload)["containers"]:
            known = ports_of([workload])
            for name in PROBES:
                probe = container.get(name)
                if probe is None:
                    yield f"{called(workload)}: no {name}"
                    continue
                asked = probe.get("httpGet") or probe.get("tcpSocket")
                if asked is not None and asked["port"] not in known:
                    yield f"{called(workload)}: {name}: no port {asked['port']}"
                if "httpGet" in probe and asked and asked["path"] not in paths_of(workload, asked["port"]):
                    yield f"{called(workload)}: {name}: nobody answers {asked['path']} at {asked['port']}"


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
                if found is None and told.get("optional"):
                    continue
                if found is None:
                    yield f"{called(workload)}: there is no {kind.removesuffix('Ref')} {told['name']}"
                else:
                    names += found.get("data", {})
            ours = IMAGES.get(image_of(container)[0])
            known = {f"BLOCKRELAY_{field.upper()}" for field in ours[0].model_fields} if ours else set[str]()
            known |= of_other_image(container)[0]
            yield from (f"{called(workload)}: its service has no setting {name}" for name in names if name not in known)
            if ours and "BLOCKRELAY_CELL" not in names:
                yield f"{called(workload)}: it does not read its cell from its label"


def imaged(objects: list[Manifest]) -> Iterator[str]:
    """Images have a version, and those of ours run as the user and on the port that their Dockerfile says."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for workload in kinds(objects, *WORKLOADS):
        for container in containers(workload):
            name, tag = image_of(container)
            if not name or not tag:
                yield f"{called(workload)}: {container['image']!r} is no image with a version"
            if name not in IMAGES:
                continue
            target = dockerfile.partition(f"AS {IMAGES[name][1]}\n")[2]
            (port,) = re.findall(r"^EXPOSE (\d+)", target.partition("\nFROM ")[0], re.MULTILINE)
            metrics = environment(container).get("BLOCKRELAY_METRICS_PORT")
            listens = [int(port), *([] if metrics is None else [int(metrics)])]
            if [one["containerPort"] for one in container["ports"]] != listens:
                yield f"{called(workload)}: its image listens on {' and '.join(map(str, listens))}"
            user = pod_of(workload)["securityContext"].get("runAsUser")
            if f"USER {user}:" not in dockerfile:
                yield f"{called(workload)}: its image has no user {user}"


def pinned(objects: list[Manifest]) -> Iterator[str]:
    """All images are named by digest, or none is."""
    images = [
        (called(one), *image_of(container)) for one in kinds(objects, *WORKLOADS) for container in containers(one)
    ]
    if not any(_DIGEST.fullmatch(version) for *_, version in images):
        return
    for workload, name, version in images:
        if not _DIGEST.fullmatch(version):
            yield f"{workload}: {name}:{version} is no digest"


def modelled(objects: list[Manifest]) -> Iterator[str]:
    """All services have the same model, from a volume; where images are pinned, never the bundled one."""
    services = [one for one in kinds(objects, *WORKLOADS) if settings_of(one) is not None]
    models = {environment(containers(one)[0]).get("BLOCKRELAY_MODEL") for one in services}
    if len(models) > 1:
        yield f"services have the models {models}"
    for one in services:
        (container,) = containers(one)
        model = environment(container).get("BLOCKRELAY_MODEL")
        if model is None and _DIGEST.fullmatch(image_of(container)[1]):
            yield f"{called(one)}: it serves the bundled model: add components/model-image or components/model-pvc"
        if model is not None and model not in {mount["mountPath"] for mount in container["volumeMounts"]}:
            yield f"{called(one)}: no model is mounted at {model}: add components/model-image or components/model-pvc"


def mounted(objects: list[Manifest]) -> Iterator[str]:
    """Mounts have volumes and volumes mounts, and what volumes show is there; a single writer is single."""
    for workload in kinds(objects, *WORKLOADS):
        claims = workload["spec"].get("volumeClaimTemplates", [])
        volumes = {one["name"] for one in pod_of(workload).get("volumes", [])}
        volumes |= {one["metadata"]["name"] for one in claims}
        for volume in pod_of(workload).get("volumes", []):
            yield from (f"{called(workload)}: {what}" for what in _missing(objects, volume))
        mounts = {mount["name"] for container in containers(workload) for mount in container.get("volumeMounts", [])}
        yield from (f"{called(workload)}: there is no volume {name}" for name in sorted(mounts - volumes))
        yield from (f"{called(workload)}: nobody mounts volume {name}" for name in sorted(volumes - mounts))
        for claim in claims:
            modes = claim["spec"]["accessModes"]
            if "ReadWriteOncePod" in modes and len(modes) > 1:
                yield f"{called(workload)}: ReadWriteOncePod stands alone"
            if "fsGroup" not in pod_of(workload).get("securityContext", {}):
                yield f"{called(workload)}: without fsGroup its user cannot write on its volume"


def renewed(objects: list[Manifest]) -> Iterator[str]:
    """A Secret that pods show as files keeps its name and is mounted as a folder: a change reaches pods as they are."""
    for workload in kinds(objects, *WORKLOADS):
        shown = {one["name"]: one["secret"] for one in pod_of(workload).get("volumes", []) if "secret" in one}
        for name in (secret["secretName"] for secret in shown.values()):
            if _OF_CONTENT.search(name):
                yield f"{called(workload)}: a change of Secret {name} replaces its pods"
        for mount in (mount for container in containers(workload) for mount in container.get("volumeMounts", [])):
            if mount["name"] in shown and "subPath" in mount:
                yield f"{called(workload)}: a change does not reach {mount['mountPath']}, which is a subPath"


def _missing(objects: list[Manifest], volume: Manifest) -> Iterator[str]:
    """What the volume shows and nobody brings."""
    sources = (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName"))
    for kind, field, name in (*sources, ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName")):
        if field not in volume:
            continue
        found = [one for one in kinds(objects, kind) if one["metadata"]["name"] == volume[field][name]]
        if not found:
            yield f"there is no {kind} {volume[field][name]}"
        for item in volume[field].get("items", []):
            if found and item["key"] not in found[0].get("data", {}):
                yield f"{kind} {volume[field][name]} has no {item['key']}"
