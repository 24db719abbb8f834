"""Prepares and describes a bare machine. What it lacks goes into temporary folders, and the machine does not change."""

import ctypes
import json
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from bench.gpu_kit.contents import KERNELS, LIBRARIES, ON_THE_MACHINE, WHEELS, have, lacking
from bench.gpu_kit.vulkan import LOADER, descriptions, nvidia_description

ROOT = Path(__file__).parents[2]
#: The same folders as `pythonpath` in pyproject.toml.
SOURCES = (
    "shared", "services/gateway", "services/scheduler", "services/worker", "services/converter",
    "services/converter/storyteller", "services/launcher", ".",
)  # fmt: skip
#: The folder where containers mount NVIDIA's driver.
_MOUNTED = "/usr/local/nvidia/lib64"
_KERNELS = ROOT / "services/worker/blockrelay_worker/kernels"
#: Most seconds of a command that describes the machine.
_ASK_S = 60
SOFTWARE = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"


def unusable() -> str:
    """Says why this machine cannot be prepared; empty if it can."""
    missing = [name for name in ON_THE_MACHINE if have(name) is None]
    if missing:
        return f"{sys.executable} has no {' and no '.join(missing)}: install it, or name another Python by PYTHON"
    return ""


def prepare(kit: Path, work: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Installs what this machine lacks into `work`, and sets variables in `environment` so that it is found.

    Returns what was done, for the report.
    """
    site = work / "site"
    wheels = sorted(str(file) for file in (kit / WHEELS).glob("*.whl"))
    missing = lacking(wheels, have)
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
        pip += ["--no-deps", "--no-compile", "--no-cache-dir", "--root-user-action", "ignore", "--upgrade"]
        subprocess.run([*pip, "--target", str(site), *missing], check=True, capture_output=True, text=True)
    sources = [str(ROOT / folder) for folder in SOURCES]
    _prepend(environment, "PYTHONPATH", [*sources, str(site)])
    done: dict[str, Any] = {
        "installed": [Path(wheel).name.split("-")[0] for wheel in missing],
        "kernels": _kernels(kit),
        "libraries": _libraries(kit, work, environment),
    }
    if driver := _driver(environment):
        done["vulkan_driver"] = driver
    return done


def _prepend(environment: dict[str, str], name: str, folders: list[str]) -> None:
    environment[name] = os.pathsep.join([*folders, *filter(None, [environment.get(name)])])


def _kernels(kit: Path) -> str:
    """Provides kernels for this Python, and returns where they are from.

    They are those built here, or else the kit's, unpacked into the checkout with the suffix of this Python.
    """
    packed = kit / KERNELS
    if any((_KERNELS / f"_baseline{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return "built here"
    if not packed.exists():
        return "none"
    with zipfile.ZipFile(packed) as archive:
        for entry in archive.namelist():
            (_KERNELS / entry.replace(".so", EXTENSION_SUFFIXES[0])).write_bytes(archive.read(entry))
    return "of the kit"


def _libraries(kit: Path, work: Path, environment: dict[str, str]) -> list[str]:
    """Unpacks the kit's shared libraries that the machine lacks, adds them to the search path, and returns their
    names."""
    folder, unpacked = work / "libraries", list[str]()
    if (kit / LIBRARIES).exists():
        with zipfile.ZipFile(kit / LIBRARIES) as archive:
            unpacked = [name for name in archive.namelist() if not _loads(name)]
            archive.extractall(folder, unpacked)
    folders = [str(folder)] if unpacked else []
    if Path(_MOUNTED).is_dir():
        folders.append(_MOUNTED)
    if folders:
        _prepend(environment, "LD_LIBRARY_PATH", folders)
    return unpacked


def _loads(library: str) -> bool:
    """Returns whether the machine has a library, with all that it needs."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _driver(environment: dict[str, str]) -> str:
    """Makes Vulkan use NVIDIA's driver, unless the environment names another; returns the name of its description.

    Empty: there is none, and Vulkan's loader chooses.
    """
    if named := environment.get("VK_DRIVER_FILES", environment.get("VK_ICD_FILENAMES", "")):
        return Path(named).name
    description = nvidia_description(descriptions())
    if description is None:
        return ""
    environment["VK_DRIVER_FILES"] = str(description)
    return description.name


def described(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns versions, NVIDIA's GPUs and Vulkan's devices.

    Processes of their own find these out, because a faulty driver may crash a process.
    """
    names = (
        "numpy", "onnx", "onnxruntime", "onnxruntime-ep-webgpu", "torch", "cuda-bindings", "nvidia-cuda-nvrtc",
        "tokenizers", "pytest",
    )  # fmt: skip
    ask = "import json, sys; from bench.gpu_kit.contents import have; "
    ask += "print(json.dumps({name: have(name) for name in sys.argv[1:]}))"
    smi = "name,driver_version,memory.total,compute_cap"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "packages": _json(environment, sys.executable, "-c", ask, *names),
        "nvidia": _said(environment, "nvidia-smi", f"--query-gpu={smi}", "--format=csv,noheader"),
        "vulkan": _json(environment, sys.executable, "-m", "bench.gpu_kit.vulkan"),
        "loader": LOADER,
    }


def find_devices(environment: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the devices that `blockrelay devices` finds.

    ONNX Runtime may see no GPU although Vulkan does: it looks into folders of the system that some virtual machines do
    not have. Then the variable that admits drivers on CPUs is set in `environment`, and the devices are listed again.
    """
    devices = _devices(environment)
    if _webgpu(devices) or environment.get(SOFTWARE) == "1":
        return devices
    shown = _json(environment, sys.executable, "-m", "bench.gpu_kit.vulkan") or {}
    if not any("GPU" in one["type"] for one in shown.get("devices", ())):
        return devices
    environment[SOFTWARE] = "1"
    return _devices(environment)


def _devices(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    answer = _json(environment, sys.executable, "-m", "blockrelay_worker.offline.devices", "--json") or {}
    for one in answer.get("devices", ()):
        one.pop("uuid", None)
    return answer.get("devices", [])


def _webgpu(devices: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((one for one in devices if one["id"] == "webgpu:0" and not one["problem"]), None)


def _said(environment: Mapping[str, str], *command: str) -> str:
    """Returns what a command prints, or `none: ` and the cause if it fails."""
    try:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none: {type(error).__name__}"
    return done.stdout.strip() if done.returncode == 0 else f"none: exit code {done.returncode}"


def _json(environment: Mapping[str, str], *command: str) -> Any:
    try:
        return json.loads(_said(environment, *command).splitlines()[-1])
    except (ValueError, IndexError):
        return None
