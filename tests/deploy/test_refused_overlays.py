"""What is missing is said by kustomize in words of ours, before anything reaches a cluster."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.kubernetes.documented import command_of, run
from tests.support.kubernetes.variants import MODEL, OVERLAYS, SECRETS
from tests.support.project import ROOT


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """deploy/ as it is after a checkout."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy", ignore=shutil.ignore_patterns("secrets", "__pycache__"))
    return tmp_path


def kustomize(top: Path, overlay: str) -> "subprocess.CompletedProcess[str]":
    command = [os.environ["KUBECTL"], "kustomize", top / "deploy" / "k8s" / "overlays" / overlay]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_production_without_secrets_names_the_command_that_makes_them(fresh: Path) -> None:
    done = kustomize(fresh, "production")
    assert done.returncode and not done.stdout
    assert "run-deploy-k8s-make-secrets-first" in done.stderr


def test_production_without_a_model_says_how_one_is_chosen(fresh: Path) -> None:
    run(command_of("kubernetes.md", SECRETS), fresh)
    done = kustomize(fresh, "production")
    assert done.returncode and not done.stdout and done.stderr.count("\n") == 1
    assert (
        "no model: in the overlay's kustomization.yaml, put components/model-image or components/model-pvc"
        in done.stderr
    )
    run(command_of("kubernetes.md", MODEL), fresh)
    assert kustomize(fresh, "production").returncode == 0


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "production"])
def test_the_other_overlays_need_nothing(fresh: Path, overlay: str) -> None:
    assert kustomize(fresh, overlay).returncode == 0
