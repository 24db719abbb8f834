"""Every command of docs/kubernetes.md and docs/procedures: kubectl understands it, and it names what is there."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.documents import Block
from tests.support.kubernetes.contracts.limits import confined
from tests.support.kubernetes.contracts.objects import containers, kinds
from tests.support.kubernetes.documented import BLOCKS, HERE, kubectl_calls
from tests.support.kubernetes.rendering import Manifest
from tests.support.kubernetes.variants import FAILOVER
from tests.support.project import ROOT

Render = Callable[[str], list[Manifest]]
CALLS = [
    pytest.param(block, call, id=f"{block}: {' '.join(call)[:60]}") for block in BLOCKS for call in kubectl_calls(block)
]
#: Namespace of a command -> whose objects it means.
SPACES = {"blockrelay": "production", "blockrelay-demo": "demo"}
#: Pods that are made by hand.
PODS = {
    path.stem: path for path in (ROOT / "deploy" / "k8s").rglob("*.yaml") if path.stem in ("redis-volume", "loader")
}
#: Kinds as they are written on a command line.
KINDS = {
    "deployment": "Deployment",
    "statefulset": "StatefulSet",
    "scaledobject": "ScaledObject",
    "service": "Service",
    "services": "Service",
    "pod": "Pod",
}
#: What a command makes of a file for the next one in its pipe; and a cluster that is not there.
SECRET = '{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "any"}}'
NOWHERE = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}],
    "contexts": [{"name": "none", "context": {"cluster": "none"}}],
    "current-context": "none",
}


def test_every_block_is_run_or_needs_a_cluster() -> None:
    assert {block.not_run for block in BLOCKS} == {"needs a cluster", "needs helm and a cluster", HERE}


@pytest.mark.parametrize(("block", "call"), CALLS)
def test_kubectl_understands_a_command_and_misses_nothing_but_the_cluster(
    block: Block, call: list[str], overlays: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(json.dumps(NOWHERE))
    top = overlays["production"].parents[3]
    (top / "model").mkdir(exist_ok=True)
    if call[-2:] == ["-k", "."]:  # beside the kustomization that the block has written
        call = [*call[:-1], str(overlays["with-a-plan"])]
    done = subprocess.run(
        [os.environ["KUBECTL"], *call[1:]],
        cwd=top,
        env={**os.environ, "KUBECONFIG": str(tmp_path / "config")},
        input=SECRET,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "--local" in call:
        assert done.returncode == 0 and "kind: Pod" in done.stdout, f"{block}: {done.stdout}{done.stderr}"
        return
    if "--dry-run=client" in call:
        assert done.returncode == 0 and "kind: Secret" in done.stdout, f"{block}: {done.stdout}{done.stderr}"
        return
    assert "127.0.0.1:1" in done.stderr and "refused" in done.stderr, f"{block}: {done.stdout}{done.stderr}"


def test_a_command_that_is_none_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(json.dumps(NOWHERE))
    done = subprocess.run(
        [os.environ["KUBECTL"], "scale", "deployment", "x", "--replica", "0", f"--kubeconfig={tmp_path / 'config'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "refused" not in done.stderr and done.returncode


@pytest.mark.parametrize(("block", "call"), CALLS)
def test_a_command_names_what_is_there(block: Block, call: list[str], render: Render) -> None:
    """Objects, pods, containers and files of the overlay whose namespace it says; what it creates is for a chart."""
    if "create" in call:
        values = "".join(path.read_text() for path in (ROOT / "deploy" / "k8s" / "charts").iterdir())
        secrets = {one["metadata"]["name"] for one in kinds(render("production"), "Secret")}
        name = call[call.index("generic") + 1]
        page = (ROOT / "docs" / "kubernetes.md").read_text()  # whose lines for an overlay may take it
        assert f": {name}\n" in values or name in secrets or f"credentials: {{ name: {name}," in page, block
        return
    space = call[call.index("-n") + 1] if "-n" in call else "blockrelay"
    objects = render(SPACES[space])
    everything = objects + (render(FAILOVER) if space == "blockrelay" else [])  # where there are Sentinels
    there = {(kind, one["metadata"]["name"]) for kind in KINDS.values() for one in kinds(everything, kind)}
    there |= {("Pod", f"{one['metadata']['name']}-0") for one in kinds(objects, "StatefulSet")}
    there |= {("Pod", yaml.safe_load(path.read_text())["metadata"]["name"]) for path in PODS.values()}
    ours, flags = [word for word in call if word != "--"], call[: call.index("--")] if "--" in call else call
    kind = "Pod" if {"exec", "cp"} & set(flags[:4]) else ""
    for word in ours:
        parts = [part.partition(":")[0] for part in word.split("/")]
        for before, part in zip([word, *parts], [*parts, ""], strict=True):
            kind = KINDS.get(before, kind)
            if re.fullmatch("blockrelay-[a-z0-9-]*[a-z0-9]", part) and part != space:
                assert (kind, part) in there, f"{block}: no {kind} {part}"
    for flag, exists in (("-f", Path.is_file), ("-k", Path.is_dir)):
        if flag in flags and flags[flags.index(flag) + 1] not in (".", "-"):
            assert exists(ROOT / flags[flags.index(flag) + 1]), block
    if "-c" in flags:
        (redis,) = kinds(objects, "StatefulSet")
        assert flags[flags.index("-c") + 1] in {container["name"] for container in containers(redis)}, block


@pytest.mark.parametrize("path", PODS.values(), ids=PODS)
def test_a_pod_that_is_made_by_hand_is_let_into_a_restricted_namespace(path: Path) -> None:
    pod = yaml.safe_load(path.read_text())
    account = {"kind": "ServiceAccount", "metadata": {"name": "none"}, "automountServiceAccountToken": False}
    spec = {**pod["spec"], "serviceAccountName": "none"}
    workload = {"kind": "Deployment", "metadata": pod["metadata"], "spec": {"template": {"spec": spec}}}
    assert list(confined([workload, account])) == []


@pytest.mark.parametrize("path", PODS.values(), ids=PODS)
def test_a_pod_that_is_made_by_hand_runs_the_image_that_the_cluster_runs(path: Path, tmp_path: Path) -> None:
    """Its file names no version, and the documented command puts in a workload's: a digest where those have one."""
    (command,) = [block for block in BLOCKS if str(path.relative_to(ROOT)) in block.text]
    (container,) = yaml.safe_load(path.read_text())["spec"]["containers"]
    assert ":" not in container["image"] and "@" not in container["image"]
    asked, applied = image_lines(command)
    assert asked.startswith("image=$(kubectl -n blockrelay get ")
    wanted = f"registry.example/any@sha256:{'1' * 64}"
    (tmp_path / "config").write_text(json.dumps(NOWHERE))
    local = applied.partition("|")[0].replace("kubectl", f'"$KUBECTL" --kubeconfig={tmp_path}/config', 1)
    done = subprocess.run(
        ["sh", "-euc", f"image={wanted}\n{local}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    made = yaml.safe_load(done.stdout)
    assert [one["image"] for one in made["spec"]["containers"]] == [wanted]


def image_lines(block: Block) -> list[str]:
    """The line that asks for the image, and the one behind it."""
    lines = block.text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("image=$("))
    return lines[first : first + 2]
