"""The overlays and components of deploy/k8s: valid in every version that we claim, and in agreement with the code."""

import shutil
import subprocess
from base64 import b64decode
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from blockrelay.auth.api_keys import Tenant, add_key
from blockrelay_worker.policy import LOAD_LIMIT_S
from tests.support.kubernetes import rendering
from tests.support.kubernetes.contracts.objects import containers, kinds, pod_of
from tests.support.kubernetes.contracts.rules import complaints
from tests.support.kubernetes.custom_resources import custom_complaints
from tests.support.kubernetes.rendering import Manifest, is_custom, schema_complaints
from tests.support.kubernetes.variants import VARIANTS
from tests.support.project import ROOT

#: The three newest, and the oldest that we claim.
VERSIONS = ("1.37", "1.36", "1.35", "1.30")
Render = Callable[[str], list[Manifest]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_valid_in_every_version_that_we_claim(
    render: Render, variant: str, version: str, tmp_path: Path
) -> None:
    said = schema_complaints(render(variant), version, tmp_path)
    if (variant, version) == ("with-a-model-image", "1.30"):
        assert len(said) == 3 and all("'image' was unexpected" in line for line in said), said
    else:
        assert said == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_keeps_our_contracts(render: Render, variant: str) -> None:
    assert complaints(render(variant)) == []


@pytest.mark.parametrize("variant", ["production", "with-hpa", "with-gateway-api"])
def test_custom_resources_are_what_their_operators_know(render: Render, variant: str, tmp_path: Path) -> None:
    objects = render(variant)
    assert any(is_custom(one) for one in objects)
    assert custom_complaints(objects, tmp_path) == []


def test_a_plan_reaches_the_schedulers(render: Render, overlays: dict[str, Path]) -> None:
    objects = render("with-a-plan")
    (shown,) = kinds(objects, "ConfigMap")
    assert shown["data"] == {"plan.json": (overlays["with-a-plan"] / "plan.json").read_text()}
    (scheduler,) = [one for one in kinds(objects, "Deployment") if one["metadata"]["name"] == "blockrelay-scheduler"]
    assert {"name": "BLOCKRELAY_PLAN", "value": "/plan/plan.json"} in containers(scheduler)[0]["env"]
    shown["metadata"]["name"] = "another"
    assert [said for said in complaints(objects) if "there is no ConfigMap blockrelay-plan" in said]


def test_the_model_reaches_every_service(render: Render) -> None:
    for variant in ("with-a-model-image", "with-a-model-volume"):
        services = [one for one in kinds(render(variant), "Deployment") if "redis" not in one["metadata"]["name"]]
        assert len(services) == 3
        for service in services:
            (container,) = containers(service)
            assert {"name": "BLOCKRELAY_MODEL", "value": "/model"} in container["env"]
            assert {"name": "model", "mountPath": "/model", "readOnly": True} in container["volumeMounts"]


def test_a_gpu_worker_has_a_gpu_of_its_own_and_time_to_load(render: Render) -> None:
    objects = render("with-gpus")
    (worker,) = [one for one in kinds(objects, "Deployment") if one["metadata"]["name"] == "blockrelay-worker-gpu"]
    (container,) = containers(worker)
    assert {resources["nvidia.com/gpu"] for resources in container["resources"].values()} == {"1"}
    assert {"name": "BLOCKRELAY_GPU", "value": "cuda:0"} in container["env"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > LOAD_LIMIT_S
    assert worker["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}


def test_what_every_worker_is_given_reaches_those_with_gpus(overlays: dict[str, Path]) -> None:
    folder = overlays["with-gpus"].parent / "gpus-and-more"
    if not folder.exists():
        folder.mkdir()
        found = yaml.safe_load((overlays["with-gpus"] / "kustomization.yaml").read_text())
        found["components"] += [f"../../components/{name}" for name in ("model-pvc", "prometheus-operator")]
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(found))
    objects = rendering.render(folder)
    assert complaints(objects) == []
    (worker,) = [one for one in kinds(objects, "Deployment") if one["metadata"]["name"] == "blockrelay-worker-gpu"]
    assert {"name": "BLOCKRELAY_MODEL", "value": "/model"} in containers(worker)[0]["env"]


def test_overlays_say_what_the_heads_of_components_leave_to_them(render: Render) -> None:
    for one in kinds(render("with-a-model-image"), "Deployment"):
        volumes = [volume for volume in pod_of(one)["volumes"] if "image" in volume]
        assert [volume["image"]["reference"] for volume in volumes] in ([], ["registry.example/model@sha256:..."])
    objects = render("with-gateway-api")
    assert kinds(objects, "Gateway")[0]["spec"]["gatewayClassName"] == "your-class"
    assert kinds(objects, "HTTPRoute")[0]["spec"]["hostnames"] == ["models.example"]


def test_two_cells_share_no_namespace(render: Render) -> None:
    objects = render("two-cells")
    cells = {
        (one["metadata"]["namespace"], one["metadata"]["labels"]["blockrelay.io/cell"])
        for one in kinds(objects, "Deployment", "StatefulSet")
    }
    assert cells == {("blockrelay-c0", "c0"), ("blockrelay-c1", "c1")}


def test_with_valkey_no_control_redis_of_ours_is_left(render: Render) -> None:
    objects = render("with-valkey")
    assert not [one for one in objects if one["metadata"]["name"] == "blockrelay-redis-control"]
    (gateway,) = [one for one in kinds(objects, "Deployment") if one["metadata"]["name"] == "blockrelay-gateway"]
    assert {"name": "BLOCKRELAY_ACCEPT_REPLICAS", "value": "1"} in containers(gateway)[0]["env"]


def test_each_role_has_a_password_of_its_own_of_which_redis_reads_the_digest(render: Render) -> None:
    secrets = {one["metadata"]["name"]: one["data"] for one in kinds(render("production"), "Secret")}

    def told(role: str, what: str) -> str:
        (data,) = [data for name, data in secrets.items() if name.startswith(f"blockrelay-redis-{role}")]
        return b64decode(data[what]).decode()

    passwords = {
        r: b64decode(secrets[f"blockrelay-password-{r}"]["password"]).decode().strip()
        for r in ("gateway", "scheduler", "worker")
    }
    passwords["keda"], passwords["reloader"] = told("keda", "password"), told("users", "reloader").strip()
    assert len(set(passwords.values())) == 5
    for role, password in passwords.items():
        users = told("users", "control.acl")
        assert f"user {role} on #{sha256(password.encode()).hexdigest()} " in users and password not in users


def test_a_new_key_password_or_certificate_replaces_no_pod(render: Render, overlays: dict[str, Path]) -> None:
    """What pods are made of stays as it is, and so do the names of what they mount."""
    folder = overlays["production"].parent / "production-later"
    shutil.copytree(overlays["production"], folder)
    add_key(folder / "secrets" / "api-keys.json", Tenant(name="another"))
    for role in ("gateway", "scheduler", "worker", "reloader"):
        (folder / "secrets" / "passwords" / role).write_text("another\n")
    (folder / "secrets" / "ca.crt").unlink()
    (folder / "secrets" / "tls.crt").unlink()
    subprocess.run([ROOT / "deploy" / "k8s" / "make-secrets", folder / "secrets"], check=True)
    after = rendering.render(folder)
    pods = ("Deployment", "StatefulSet")
    assert kinds(after, *pods) == kinds(render("production"), *pods)
    (keys,) = [one["data"] for one in kinds(after, "Secret") if one["metadata"]["name"] == "blockrelay-api-keys"]
    assert b"another" in b64decode(keys["api-keys.json"])
    shutil.rmtree(folder)
