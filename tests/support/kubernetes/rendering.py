"""Overlays of deploy/k8s as Kubernetes would get them."""

import os
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.project import ROOT

OVERLAYS = ROOT / "deploy" / "k8s" / "overlays"
Manifest = dict[str, Any]


@cache
def _rendered(folder: Path) -> str:
    done = subprocess.run([os.environ["KUBECTL"], "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(overlay: str | Path) -> list[Manifest]:
    """All objects of an overlay, ours by name or any by its folder; the caller's own copies."""
    folder = OVERLAYS / overlay  # an absolute folder stays what it is
    return [found for found in yaml.safe_load_all(_rendered(folder)) if found]


def schema_complaints(objects: Iterable[Manifest], version: str, folder: Path) -> list[str]:
    """What the API's schema of this version says against them, strictly; a line each."""
    path = folder / "objects.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    done = subprocess.run(
        [os.environ["KUBERNETES_VALIDATE"], "-k", version, "--strict", path],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line and not line.startswith("INFO ")]
    assert bool(lines) == bool(done.returncode), done
    return lines
