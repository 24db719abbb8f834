"""Describes this machine for a report of figures."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from blockrelay.host.cpu import cores, cpu_facts, cpu_name
from blockrelay.host.memory import total_bytes

#: CPU flags that decide the speed of integer matmuls and the kernels.
_TELLING_FLAGS = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "asimddp", "i8mm")
_PACKAGES = ("blockrelay", "onnxruntime", "numpy", "redis")


def describe_machine() -> dict[str, Any]:
    """Returns the CPU's name and important flags, the usable cores, the memory in GiB, the system and versions.

    Packages that are not installed have no version.
    """
    info = cpu_facts()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return {
        "cpu": cpu_name(),
        "flags": [flag for flag in _TELLING_FLAGS if flag in flags],
        "cores": cores(),
        "memory_gib": round(total_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: installed for name in _PACKAGES if (installed := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
