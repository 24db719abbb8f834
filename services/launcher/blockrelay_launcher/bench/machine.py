"""What machine this is: figures mean nothing without it."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from blockrelay_launcher.supervisor.service_specs import cores

#: CPU flags that decide how fast integer products and the kernels are.
_TELLING_FLAGS = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "asimddp", "i8mm")
_PACKAGES = ("blockrelay", "onnxruntime", "numpy", "redis")


def describe_machine() -> dict[str, Any]:
    """CPU model, telling flags, cores this process may use, memory in GiB, system and versions."""
    info = _first_of("/proc/cpuinfo")
    flags = set((info.get("flags") or info.get("Features") or "").split())
    memory = _first_of("/proc/meminfo").get("MemTotal", "").split()
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in _TELLING_FLAGS if flag in flags],
        "cores": cores(),
        "memory_gib": round(int(memory[0]) / 2**20, 1) if memory else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _first_of(path: str) -> dict[str, str]:
    """`name: value` lines up to the first empty one; empty where there is no such file."""
    try:
        head = Path(path).read_text().partition("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in head.splitlines())}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
