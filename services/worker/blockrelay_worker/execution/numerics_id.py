"""The numerics id: equal ids promise equal bits."""

import hashlib
import json
import platform

import onnxruntime as ort

from blockrelay.block_folder.manifest import Manifest
from blockrelay_worker.kernels.specification import KERNEL_NUMERICS_VERSION, PAGE

#: Changes with anything in `sampler` or `exact_math` that can change a token.
SAMPLER_VERSION = 1
#: Changes when keys and values lie in a page in another way.
PAGE_LAYOUT = f"k[head,dim,{PAGE}] v[head,{PAGE},dim] v1"


def numerics_id(manifest: Manifest) -> str:
    """`<precision>-<16 hex digits>`, or `mixed-` and these: everything besides the weights that decides a token's bits.

    Workers share a route, and pages are shared, only where it is equal; clients see it as `system_fingerprint`.
    """
    machine = platform.machine().lower()
    parts = {
        "precision": manifest.precision,
        "kernels": KERNEL_NUMERICS_VERSION,
        "sampler": SAMPLER_VERSION,
        "onnxruntime": ort.__version__,
        "pages": PAGE_LAYOUT,
        # Levels of x86-64 are proven equal; no other machine is yet.
        "machine": "x86_64" if machine in ("x86_64", "amd64") else machine,
        "folder": manifest.numerics_inputs(),
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    same = len(set(manifest.precisions)) == 1
    return f"{manifest.precision if same else 'mixed'}-{digest[:16]}"
