"""Objects of KEDA, the Prometheus operator and the Gateway API against the types and validators that npm has of them.

The types know every field, as an API server that is told to be strict; the validators know patterns and formats.
"""

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.support.kubernetes.rendering import Manifest, is_custom

PACKAGES = {
    "keda.sh": "keda",
    "monitoring.coreos.com": "prometheus-operator",
    "gateway.networking.k8s.io": "gateway-api",
}


def custom_complaints(objects: Iterable[Manifest], folder: Path) -> list[str]:
    """What is wrong with the custom resources among `objects`; a line each."""
    custom = [one for one in objects if is_custom(one)]
    if not custom:
        return []
    modules = Path(os.environ["CRD_MODELS"])
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(modules / "node_modules")
    typed, checked = list[str](), list[str]()
    for index, one in enumerate(custom):
        group, _, version = one["apiVersion"].partition("/")
        kind, data = one["kind"], json.dumps(one)
        module = f"@kubernetes-models/{PACKAGES[group]}/{group}/{version}/{kind}"
        typed.append(
            f"import type {{ I{kind} as T{index} }} from '{module}';\nexport const o{index}: T{index} = {data};"
        )
        checked.append(
            f"import {{ {kind} as C{index} }} from '{module}';\n"
            f"try {{ new C{index}({data}).validate() }} catch (error) {{ console.log('{kind}: ' + error.message) }}"
        )
    (folder / "typed.ts").write_text("\n".join(typed))
    (folder / "checked.mjs").write_text("\n".join(checked))
    strict = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext"]
    said = _run(["node", "node_modules/typescript/bin/tsc", *strict, "typed.ts"], folder)
    return [*said, *_run(["node", "checked.mjs"], folder)]


def _run(command: list[str], folder: Path) -> list[str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()
