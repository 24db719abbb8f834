"""The overlays of deploy/k8s: valid in every version that we claim, in agreement with each other and with the code.

Mistakes that people make in manifests, planted, are found; schemas alone find two of them.
"""

import os
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest

from blockrelay_scheduler.plan_command.__main__ import run as plan
from tests.support.kubernetes.contracts import complaints, containers, kinds, pod_of
from tests.support.kubernetes.rendering import OVERLAYS, Manifest, render, schema_complaints

#: The three newest, and the oldest that we claim.
VERSIONS = ("1.37", "1.36", "1.35", "1.30")
EVERY = sorted(path.name for path in OVERLAYS.iterdir())


def one(objects: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [each for each in kinds(objects, kind) if each["metadata"]["name"] == f"blockrelay-{name}"]
    return found


def gateway(objects: list[Manifest]) -> Manifest:
    return containers(one(objects, "Deployment", "gateway"))[0]


def misspelt(objects: list[Manifest]) -> None:
    one(objects, "Deployment", "gateway")["spec"]["replica"] = 3


def port_as_text(objects: list[Manifest]) -> None:
    gateway(objects)["ports"][0]["containerPort"] = "8000"


def long_port_name(objects: list[Manifest]) -> None:
    gateway(objects)["ports"][0]["name"] = "hypertext-transfer"


def other_labels(objects: list[Manifest]) -> None:
    one(objects, "Deployment", "gateway")["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] = "gate"


def request_above_limit(objects: list[Manifest]) -> None:
    containers(one(objects, "Deployment", "worker-cpu"))[0]["resources"]["requests"]["cpu"] = "3"


def mount_without_volume(objects: list[Manifest]) -> None:
    gateway(objects)["volumeMounts"].append({"name": "models", "mountPath": "/models"})


def budget_with_both(objects: list[Manifest]) -> None:
    one(objects, "PodDisruptionBudget", "gateway")["spec"]["minAvailable"] = 1


def bad_name(objects: list[Manifest]) -> None:
    one(objects, "Service", "gateway")["metadata"]["name"] = "Blockrelay_Gateway"


def empty_image(objects: list[Manifest]) -> None:
    gateway(objects)["image"] = ""


def long_pre_stop(objects: list[Manifest]) -> None:
    gateway(objects)["lifecycle"]["preStop"]["sleep"]["seconds"] = 30


def shared_single_writer(objects: list[Manifest]) -> None:
    claim = one(objects, "StatefulSet", "redis-control")["spec"]["volumeClaimTemplates"][0]
    claim["spec"]["accessModes"].append("ReadWriteMany")


def port_70000(objects: list[Manifest]) -> None:
    gateway(objects)["ports"][0]["containerPort"] = 70000


def quantity(objects: list[Manifest]) -> None:
    gateway(objects)["resources"]["limits"]["memory"] = "1536Mib"


def removed_version(objects: list[Manifest]) -> None:
    one(objects, "PodDisruptionBudget", "gateway")["apiVersion"] = "policy/v1beta1"


def privileged(objects: list[Manifest]) -> None:
    gateway(objects)["securityContext"]["privileged"] = True


def elsewhere(objects: list[Manifest]) -> None:
    one(objects, "Service", "gateway")["metadata"]["namespace"] = "default"


def unknown_setting(objects: list[Manifest]) -> None:
    containers(one(objects, "Deployment", "worker-cpu"))[0]["env"].append({"name": "BLOCKRELAY_TREADS", "value": "2"})


def service_links(objects: list[Manifest]) -> None:
    del pod_of(one(objects, "Deployment", "gateway"))["enableServiceLinks"]


def drain_without_time(objects: list[Manifest]) -> None:
    pod_of(one(objects, "Deployment", "worker-cpu"))["terminationGracePeriodSeconds"] = 30


def policy_for_nobody(objects: list[Manifest]) -> None:
    one(objects, "NetworkPolicy", "redis")["spec"]["ingress"][0]["ports"][0]["port"] = "http"


def no_policies(objects: list[Manifest]) -> None:
    objects[:] = [each for each in objects if each["kind"] != "NetworkPolicy"]


def no_way_to_names(objects: list[Manifest]) -> None:
    del one(objects, "NetworkPolicy", "services")["spec"]["egress"][1]


def misspelt_worker(objects: list[Manifest]) -> None:
    one(objects, "NetworkPolicy", "services")["spec"]["podSelector"]["matchExpressions"][0]["values"][2] = "worker"


def nobody_may_come(objects: list[Manifest]) -> None:
    came = one(objects, "NetworkPolicy", "redis")["spec"]["ingress"][0]["from"][0]["podSelector"]
    came["matchExpressions"][0]["values"] = ["gateway"]


def misspelt_redis(objects: list[Manifest]) -> None:
    secret = next(each for each in kinds(objects, "Secret") if "worker" in each["metadata"]["name"])
    secret["data"]["BLOCKRELAY_REDIS_URL"] = b64encode(b"redis://blockrelay-redis:6379/0").decode()


def nobody_may_go(objects: list[Manifest]) -> None:
    one(objects, "PodDisruptionBudget", "gateway")["spec"]["maxUnavailable"] = 0


def last_one_must_stay(objects: list[Manifest]) -> None:
    budget = one(objects, "PodDisruptionBudget", "redis-control")["spec"]
    del budget["maxUnavailable"]
    budget["minAvailable"] = 1


def volume_of_root(objects: list[Manifest]) -> None:
    del pod_of(one(objects, "StatefulSet", "redis-control"))["securityContext"]["fsGroup"]


#: Those that the schema sees.
SEEN_BY_SCHEMA = (misspelt, port_as_text)
MISTAKES: tuple[Callable[[list[Manifest]], None], ...] = (
    long_port_name, other_labels, request_above_limit, mount_without_volume, budget_with_both, bad_name, empty_image,
    long_pre_stop, shared_single_writer, port_70000, quantity, removed_version, privileged, elsewhere, unknown_setting,
    service_links, drain_without_time, policy_for_nobody, no_policies, no_way_to_names, misspelt_worker,
    nobody_may_come, misspelt_redis, nobody_may_go, last_one_must_stay, volume_of_root,
)  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", EVERY)
def test_an_overlay_is_valid_in_every_version_that_we_claim(overlay: str, version: str, tmp_path: Path) -> None:
    assert schema_complaints(render(overlay), version, tmp_path) == []


@pytest.mark.parametrize("overlay", EVERY)
def test_an_overlay_keeps_our_contracts(overlay: str) -> None:
    assert complaints(render(overlay)) == []


def overlay_with_a_plan(folder: Path, plan_file: str) -> Path:
    """As docs/kubernetes.md has it."""
    ours = os.path.relpath(OVERLAYS.parent, folder.resolve())
    (folder / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: blockrelay-demo\n"
        f"resources: [{ours}/overlays/demo]\ncomponents: [{ours}/components/plan]\n"
        f"configMapGenerator:\n  - {{ name: blockrelay-plan, files: [{plan_file}] }}\n"
    )
    return folder


def test_a_plan_reaches_the_schedulers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["--strategy", "uniform", "--parts", "2", "--json"]) == 0
    written = capsys.readouterr().out
    (tmp_path / "plan.json").write_text(written)
    objects = render(overlay_with_a_plan(tmp_path, "plan.json"))
    assert complaints(objects) == [] == schema_complaints(objects, VERSIONS[0], tmp_path)
    (shown,) = kinds(objects, "ConfigMap")
    assert shown["data"] == {"plan.json": written}
    (scheduler,) = containers(one(objects, "Deployment", "scheduler"))
    assert scheduler["env"] == [{"name": "BLOCKRELAY_PLAN", "value": "/plan/plan.json"}]
    shown["metadata"]["name"] = "another"
    assert [said for said in complaints(objects) if "there is no ConfigMap blockrelay-plan" in said]


@pytest.mark.parametrize("mistake", SEEN_BY_SCHEMA)
def test_the_schema_finds_what_it_can(mistake: Callable[[list[Manifest]], None], tmp_path: Path) -> None:
    objects = render("demo")
    mistake(objects)
    assert schema_complaints(objects, VERSIONS[0], tmp_path)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_contracts_find_the_rest(mistake: Callable[[list[Manifest]], None]) -> None:
    objects = render("demo")
    mistake(objects)
    assert complaints(objects)
