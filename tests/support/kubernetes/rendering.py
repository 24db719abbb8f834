"""Overlays of deploy/k8s as Kubernetes would get them, and what the schemas of its API say against them."""

import os
import subprocess
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]


@cache
def _rendered(folder: Path) -> list[Manifest]:
    done = subprocess.run([os.environ["KUBECTL"], "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def render(folder: Path) -> list[Manifest]:
    """All objects of an overlay; the caller's own copies. What a folder gives is read once."""
    return deepcopy(_rendered(folder))


def schema_complaints(objects: Iterable[Manifest], version: str, folder: Path) -> list[str]:
    """What the API's schema of this version says against them, strictly; a line each. It has no custom resources."""
    path = folder / "objects.yaml"
    path.write_text(yaml.safe_dump_all(one for one in objects if not is_custom(one)))
    done = subprocess.run(
        [os.environ["KUBERNETES_VALIDATE"], "-k", version, "--strict", path],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line and not line.startswith("INFO ")]
    assert bool(lines) == bool(done.returncode), done
    return lines


def is_custom(one: Manifest) -> bool:
    """Whether an operator, and not Kubernetes, knows its kind."""
    group = one["apiVersion"].rpartition("/")[0]
    return "." in group and not (group.endswith(".k8s.io") and group != "gateway.networking.k8s.io")
