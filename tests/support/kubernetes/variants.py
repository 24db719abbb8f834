"""The overlays that deploy/k8s has, and such as people make of its components: what the rules are asked of.

They are made in a copy of deploy/, since the overlay for production takes secrets that are made beside it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.kubernetes.documented import command_of, run
from tests.support.project import ROOT


def example_of(place: str) -> dict[str, Any]:
    """What the head of a component, or of the base, says that an overlay has to have."""
    text = (ROOT / "deploy" / "k8s" / place / "kustomization.yaml").read_text()
    lines = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    return yaml.safe_load("\n".join(lines))


def _told_of_sentinels() -> list[dict[str, object]]:
    """What the roles of the overlay `demo` are told in place of the address of one server."""
    hosts = ",".join(f"blockrelay-sentinel-{number}.blockrelay-sentinel" for number in range(3))
    literals = [
        f"BLOCKRELAY_REDIS_URL=redis+sentinel://{hosts}/blockrelay/0",
        "BLOCKRELAY_PAYLOAD_REDIS_URL=redis://blockrelay-redis-payload:6379/0",
    ]
    roles = ("gateway", "scheduler", "worker")
    return [{"name": f"blockrelay-redis-{role}", "behavior": "replace", "literals": literals} for role in roles]


#: Ours.
OVERLAYS = tuple(sorted(path.name for path in (ROOT / "deploy" / "k8s" / "overlays").iterdir()))
#: Overlays on `demo` -> what they add.
ON_DEMO: dict[str, dict[str, object]] = {
    "with-a-plan": example_of("components/plan"),
    "with-hpa": {"components": ["../../components/hpa", "../../components/prometheus-operator"]},
    "with-a-model-image": example_of("components/model-image"),
    "with-a-model-volume": {"components": ["../../components/model-pvc"]},
    "with-gateway-api": example_of("components/gateway-api"),
    "with-an-ingress": example_of("components/ingress"),
    "with-an-exporter": {"components": ["../../components/redis-exporter", "../../components/prometheus-operator"]},
    "with-sentinels": {"components": ["../../components/sentinel"], "secretGenerator": _told_of_sentinels()},
    "with-sentinels-gpus-and-cells": example_of("components/worker-gpu")
    | {
        "components": [f"../../components/{n}" for n in ("sentinel", "worker-gpu", "cells", "sentinel/for-production")],
        "secretGenerator": [*_told_of_sentinels(), *example_of("components/cells")["secretGenerator"]],
    },
    "another-instance": example_of("base")
    | {
        "components": [f"../../components/{name}" for name in ("sentinel", "prometheus-operator")],
        "secretGenerator": _told_of_sentinels(),
    },
    "with-gpus": example_of("components/worker-gpu"),
    "with-other-cells": example_of("components/cells"),
    "with-valkey": {
        "components": ["../../components/valkey"],
        "secretGenerator": [
            {
                "name": f"blockrelay-redis-{role}",
                "behavior": "replace",
                "literals": [
                    f"BLOCKRELAY_REDIS_URL=redis+sentinel://{role}:password@valkey-sentinel-0.valkey-sentinel-hl,"
                    "valkey-sentinel-1.valkey-sentinel-hl,valkey-sentinel-2.valkey-sentinel-hl/blockrelay/0"
                    "?sentinel_username=sentinel&sentinel_password=password",
                    "BLOCKRELAY_PAYLOAD_REDIS_URL=redis://blockrelay-redis-payload:6379/0",
                ],
            }
            for role in ("gateway", "scheduler", "worker")
        ],
    },
}
#: The first JSON of docs/cells.md.
_CELLS = re.compile(r"```json\n(.*?)```", re.DOTALL)
#: Production as it is behind the documented commands for Sentinels.
FAILOVER = "production-with-sentinels"
VARIANTS = (*OVERLAYS, *ON_DEMO, FAILOVER)
#: Its commands make what the overlay for production takes, and choose a model for it.
SECRETS = "make-secrets"
MODEL = "no-model"
#: Its commands give production a control Redis that fails over.
SENTINELS = "make-sentinel-secrets"


def file_of_cells() -> str:
    """The one that docs/cells.md shows."""
    found = _CELLS.search((ROOT / "docs" / "cells.md").read_text())
    assert found is not None
    return found[1]


def prepare(folder: Path) -> dict[str, Path]:
    """Variant -> its overlay in a copy of deploy/ in `folder`, whose secrets the documented commands have made."""
    left_out = shutil.ignore_patterns("secrets", "__pycache__")
    shutil.copytree(ROOT / "deploy", folder / "deploy", ignore=left_out)
    run(command_of("kubernetes.md", SECRETS), folder)
    run(command_of("kubernetes.md", MODEL), folder)
    overlays = folder / "deploy" / "k8s" / "overlays"
    for name, more in ON_DEMO.items():
        (overlays / name).mkdir()
        head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
        lines = head | {"namespace": "blockrelay-demo", "resources": ["../demo"], **more}
        (overlays / name / "kustomization.yaml").write_text(yaml.safe_dump(lines))
    command = [
        sys.executable,
        "-m",
        "blockrelay_scheduler.plan_command",
        "--strategy",
        "uniform",
        "--parts",
        "2",
        "--json",
    ]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (overlays / "with-a-plan" / "plan.json").write_text(written)
    for name in ("with-other-cells", "with-sentinels-gpus-and-cells"):
        (overlays / name / "cells.json").write_text(file_of_cells())
    again = folder / FAILOVER
    shutil.copytree(folder / "deploy", again / "deploy")
    run(command_of("kubernetes.md", SENTINELS), again)
    return {name: overlays / name for name in VARIANTS} | {FAILOVER: again / "deploy/k8s/overlays/production"}
