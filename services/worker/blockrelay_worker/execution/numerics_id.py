"""The numerics id: equal ids promise equal bits."""

import hashlib
import json
import platform
from collections.abc import Mapping
from typing import Final

import onnxruntime as ort

from blockrelay.block_folder.manifest import Manifest
from blockrelay_worker.kernels.specification import KERNEL_NUMERICS_VERSION, PAGE

#: Raised with every change of `sampler` or `exact_math` that can change a token.
SAMPLER_VERSION = 1
#: Name of the layout of keys and values in a page; a new layout gets a new name.
PAGE_LAYOUT = f"k[head,dim,{PAGE}] v[head,{PAGE},dim] v1"

_X86_64: Final = ("x86_64", "amd64")
#: Architectures that tests/equality proves to give equal bits, from one CPU level to the next and to each other.
_PROVEN_EQUAL: Final = (*_X86_64, "aarch64", "arm64")


def numerics_id(manifest: Manifest) -> str:
    """Returns the numerics id of executors that use our CPU kernels: `<precision>-<16 hex digits>`, or `mixed-...`.

    It is a hash of all that decides a token's bits but the weights. Other executors make theirs
    (`Executors.numerics_id`). Only workers with equal ids share routes and KV pages. Clients see the id as
    `system_fingerprint`.
    """
    machine = platform.machine().lower()
    # Whole numbers have one right sum, which known answers prove at start; sums of floats are ONNX Runtime's.
    equal = _PROVEN_EQUAL if manifest.exact else _X86_64
    parts = {
        "precision": manifest.precision,
        "kernels": KERNEL_NUMERICS_VERSION,
        "sampler": SAMPLER_VERSION,
        "pages": PAGE_LAYOUT,
        "machine": "x86_64" if machine in equal else machine,
        "folder": manifest.numerics_inputs(),
    }
    if not manifest.exact:
        parts["onnxruntime"] = ort.__version__
    return hashed_id(manifest, parts)


def hashed_id(manifest: Manifest, parts: Mapping[str, object], *names: str) -> str:
    """Returns `<precision>-<names>-<16 hex digits>`, with `mixed` for several precisions. `parts`: all that decides a
    token's bits but the weights."""
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    same = len(set(manifest.precisions)) == 1
    return "-".join((manifest.precision if same else "mixed", *names, digest[:16]))
