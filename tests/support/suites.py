"""Every test is in exactly one suite: the one that its marker names, else that of its folder."""

from collections.abc import Iterable
from pathlib import Path

#: Marker -> what it means. The make targets choose by these names.
SUITES = {
    "quick": "what `make test` runs: one process and its Redis, seconds",
    "system": "starts whole systems, kills them, breaks what they stand on (make test-system)",
    "faults": "every failure point of every service, once with each action (make faults)",
    "equality": "hundreds of requests, each against its solo run (make equality)",
    "emulated": "runs whole models on emulated CPUs; needs qemu-user (make equality)",
    "thorough": "long tests of one part: conversions, simulations, commands as processes (make thorough)",
    "model": "every rule and small configuration of the protocol model (make model)",
    "kernels": "the native kernels in every shape of a head and on long contexts (make kernels)",
    "sanitizer": "builds the kernels with AddressSanitizer and UBSan (make sanitize)",
    "onnx_blocks": "ONNX blocks in the form of every exporter: checked, run, imported, split (make onnx-blocks)",
    "exporters": "needs what real exporters have written (make parity-exporters)",
    "fuzz": "needs schemathesis (make fuzz)",
    "deploy": "renders deploy/k8s; needs kubectl and kubernetes-validate (make check-deploy)",
    "failovers": "Redis behind Sentinels and in clusters, whose masters are replaced and killed (make failovers)",
    "observability": "needs Debian's prometheus and prometheus-alertmanager (make observability)",
    "software_gpu": "runs the WebGPU provider on a Vulkan driver that computes on CPUs (make software-gpu)",
    "clients": "real clients, each in an environment of its own (make test-clients)",
    "docker": "needs a container engine (make test-compose)",
}

#: Marker -> what it says beside the suite.
OTHER_MARKERS = {
    "float16": "needs a device that computes in float16: of the drivers of make software-gpu, lavapipe",
    "driver_on_cpu": "shows what a driver that computes on CPUs does, or chooses for want of float16; no GPU does",
}

#: The first part of a test's path below `tests/` -> its suite; `quick` for all others.
FOLDERS = {"stories": "system", "recovery": "system", "faults": "system", "equality": "system", "deploy": "deploy"}


def suite_of(path: Path, markers: Iterable[str]) -> str:
    """The suite of a test in `path` (relative to `tests/`). Raises ValueError where two markers name one."""
    named = sorted(set(markers) & SUITES.keys())
    if len(named) > 1:
        raise ValueError(f"a test is in one suite, not in {' and '.join(named)}")
    return named[0] if named else FOLDERS.get(path.parts[0], "quick")
