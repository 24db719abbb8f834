"""The devices of this machine: what each is, what it can do, and whether a stage could run there."""

import csv
import importlib.util
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnxruntime as ort

from blockrelay.errors import UsageError
from blockrelay.host.cpu import cpu_name
from blockrelay.host.memory import total_bytes
from blockrelay_worker.execution.onnx.providers import Provider, WebGpuProvider

#: What the sysfs of Linux and ONNX Runtime call vendors of GPUs.
_VENDORS = {0x1002: "AMD", 0x10DE: "NVIDIA", 0x8086: "Intel", 0x106B: "Apple", 0x5143: "Qualcomm", 0x13B5: "Arm"}
#: Seconds that a driver may take to tell of its devices.
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    """`id` as `--device` of the ONNX executor takes it. None: not known."""

    id: str
    name: str
    vendor: str = ""
    memory_bytes: int | None = None
    driver: str | None = None
    features: tuple[str, ...] = ()
    """Types of floats that it computes with: f32, f16."""
    problem: str = ""
    """Why no stage can run on it; empty if one can."""


def devices_here(environment: Mapping[str, str]) -> list[FoundDevice]:
    """The CPU, then what each provider finds, or why it finds nothing. Every device has computed something."""
    cpu = FoundDevice(id="cpu", name=cpu_name(), memory_bytes=total_bytes(), features=("f32",))
    return [cpu, *_webgpu(environment), *nvidia(environment)]


def onnxruntime_version() -> str:
    """Of whichever distribution is installed."""
    return str(ort.__version__)


def _webgpu(environment: Mapping[str, str]) -> list[FoundDevice]:
    try:
        found = WebGpuProvider.devices()
        if importlib.util.find_spec("onnx") is None:
            raise UsageError("webgpu needs onnx: pip install 'blockrelay[webgpu]'")
    except UsageError as error:
        return [FoundDevice(id="webgpu", name="WebGPU", problem=str(error))]
    if not found:
        return [FoundDevice(id="webgpu", name="WebGPU", problem=_why_none(environment))]
    return [_webgpu_device(index, device) for index, device in enumerate(found)]


def _why_none(environment: Mapping[str, str]) -> str:
    reason = "no GPU here that Vulkan, Metal or D3D12 reaches"
    if environment.get("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER") == "1":
        return reason
    return f"{reason}; ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1 admits drivers that compute on CPUs"


def _webgpu_device(index: int, device: Any) -> FoundDevice:
    hardware, software = device.device, device.device.type.name == "CPU"
    vendor = _VENDORS.get(hardware.vendor_id, str(hardware.vendor))
    name = hardware.metadata.get("Description") or f"{vendor} {hardware.vendor_id:04x}:{hardware.device_id:04x}"
    provider = WebGpuProvider(index)
    problem = _failure(provider, "float32")
    features = () if problem else ("f32",) if _failure(provider, "float16") else ("f32", "f16")
    return FoundDevice(
        id=f"webgpu:{index}",
        name="a driver that computes on this CPU" if software else name,
        vendor="" if software else vendor,
        features=features,
        problem=problem,
    )


def _failure(provider: Provider, dtype: Literal["float32", "float16"]) -> str:
    """What goes wrong when the device adds two numbers of a type; empty if nothing does."""
    # Only here: `onnx` is part of the extras for GPUs.
    from blockrelay_worker.execution.onnx.graphs import sum_graph

    ones = np.ones(4, dtype)
    try:
        session = provider.session(sum_graph(dtype), quiet=True)
        (result,) = session.run(None, {"a": ones, "b": ones})
    except Exception as error:  # noqa: BLE001 ONNX Runtime's own exception types have no public common base
        return str(error).strip().rpartition(": ")[2]
    return "" if np.array_equal(np.asarray(result), ones + ones) else "1 and 1 are not 2 there"


def nvidia(environment: Mapping[str, str]) -> list[FoundDevice]:
    """NVIDIA's, as its driver tells, in the order and numbers that CUDA_VISIBLE_DEVICES gives them."""
    asked = "index,uuid,name,memory.total,driver_version"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE_S).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [row for row in csv.reader(told.splitlines(), skipinitialspace=True) if len(row) == 5]
    chosen = visible([(row[0], row[1]) for row in rows], environment.get("CUDA_VISIBLE_DEVICES"))
    return [
        FoundDevice(
            id=f"cuda:{number}",
            name=name,
            vendor="NVIDIA",
            memory_bytes=int(memory) << 20 if memory.isdigit() else None,
            driver=driver,
            problem="no executor runs on CUDA yet",
        )
        for number, (_, _, name, memory, driver) in enumerate(rows[at] for at in chosen)
    ]


def visible(devices: Sequence[tuple[str, str]], variable: str | None) -> list[int]:
    """Which of the (index, UUID) CUDA shows, and in which order: those that the variable names up to the first that is
    none, by index or the beginning of a UUID; all where it is not set."""
    if variable is None:
        return list(range(len(devices)))
    found: list[int] = []
    for word in (word.strip() for word in variable.split(",")):
        names = [at for at, (index, uuid) in enumerate(devices) if word == index or (word and uuid.startswith(word))]
        if len(names) != 1 or names[0] in found:
            break
        found += names
    return found
