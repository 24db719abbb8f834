"""The devices of this machine: name, kind, abilities, and why a stage cannot run there."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import onnxruntime as ort

from blockrelay.errors import UsageError
from blockrelay.extras import how_to_install
from blockrelay.host.cpu import cpu_name
from blockrelay.host.memory import allowed_bytes
from blockrelay.protocol.plan import CPU, GPU, Device
from blockrelay_worker.execution.onnx.probe import failure, failure_there
from blockrelay_worker.execution.onnx.providers.cuda import CudaProvider
from blockrelay_worker.execution.onnx.providers.directml import DirectMlProvider
from blockrelay_worker.execution.onnx.providers.nvidia_driver import NvidiaGpu, nvidia_gpus
from blockrelay_worker.execution.onnx.providers.openvino import OpenVinoProvider
from blockrelay_worker.execution.onnx.providers.provider import Provider
from blockrelay_worker.execution.onnx.providers.webgpu import WebGpuProvider

DeviceKind = Device | Literal["npu"]
#: PCI vendor ids of GPUs, as in Linux's sysfs and ONNX Runtime.
_VENDORS = {0x1002: "AMD", 0x10DE: "NVIDIA", 0x8086: "Intel", 0x106B: "Apple", 0x5143: "Qualcomm", 0x13B5: "Arm"}
#: Adapters that are tried: DirectML does not say how many there are.
_MAX_ADAPTERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    """A device of this machine, or the reason why a provider has none; None means unknown.

    `id` is what `--gpu` takes; `cpu` for the CPU, and a provider's name in the entry that it has no device.
    """

    id: str
    name: str
    kind: DeviceKind = GPU
    vendor: str = ""
    uuid: str | None = None
    """NVIDIA's id of the GPU, the same after every start; `--gpu` takes it too."""
    memory_bytes: int | None = None
    driver: str | None = None
    features: tuple[str, ...] = ()
    """Float types that it computes with: f32, f16."""
    problem: str = ""
    """Why no stage can run on it; empty if one can."""
    missing: bool = False
    """True if the device, or a package it needs, is not here; False if it is here but fails."""


def devices_here(environment: Mapping[str, str]) -> list[FoundDevice]:
    """Returns the CPU, then the devices of each provider, or the reason why a provider has none. OpenVINO and DirectML
    have no entry without their package. Each GPU and NPU whose package is here was tried with a small computation."""
    cpu = FoundDevice(id="cpu", name=cpu_name(), kind=CPU, memory_bytes=allowed_bytes(), features=("f32",))
    return [cpu, *cuda_devices(environment), *_webgpu(environment), *_openvino(), *_directml()]


def onnxruntime_version() -> str:
    """Returns the version of the installed ONNX Runtime, whichever distribution it is."""
    return str(ort.__version__)


def cuda_devices(environment: Mapping[str, str]) -> list[FoundDevice]:
    """Returns NVIDIA's GPUs as the driver lists them, with or without the package for CUDA. With the package, each was
    tried with a small computation. If the driver lists none, there is one entry with the reason, or no entry where the
    package is missing too."""
    problem = _lacking(CudaProvider)
    gpus = nvidia_gpus(environment)
    if not gpus and not problem:
        return [_none("cuda", "CUDA", "no GPU that nvidia-smi and CUDA_VISIBLE_DEVICES show")]
    return [_cuda_device(index, gpu, problem) for index, gpu in enumerate(gpus)]


def _cuda_device(index: int, gpu: NvidiaGpu, problem: str) -> FoundDevice:
    device = FoundDevice(
        id=f"cuda:{index}",
        name=gpu.name,
        vendor="NVIDIA",
        uuid=gpu.uuid,
        memory_bytes=gpu.memory_bytes,
        driver=gpu.driver,
    )
    if problem:
        return replace(device, problem=problem, missing=True)
    return _tried(device, lambda: CudaProvider(index, gpu))


def _webgpu(environment: Mapping[str, str]) -> list[FoundDevice]:
    try:
        devices = WebGpuProvider.devices()
    except UsageError as error:
        return [_none("webgpu", "WebGPU", str(error))]
    if problem := _lacking_onnx(WebGpuProvider):
        return [_none("webgpu", "WebGPU", problem)]
    if not devices:
        return [_none("webgpu", "WebGPU", _why_none(environment))]
    return [_webgpu_device(index, device) for index, device in enumerate(devices)]


def _why_none(environment: Mapping[str, str]) -> str:
    reason = "no GPU here that Vulkan, Metal or D3D12 reaches"
    if environment.get("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER") == "1":
        return reason
    return f"{reason}; ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1 admits drivers that compute on CPUs"


def _webgpu_device(index: int, device: Any) -> FoundDevice:
    hardware, software = device.device, device.device.type.name == "CPU"
    vendor = _VENDORS.get(hardware.vendor_id, str(hardware.vendor))
    name = hardware.metadata.get("Description") or f"{vendor} {hardware.vendor_id:04x}:{hardware.device_id:04x}"
    if software:
        name, vendor = "a driver that computes on this CPU", ""
    return _tried(FoundDevice(id=f"webgpu:{index}", name=name, vendor=vendor), lambda: WebGpuProvider(index))


def _openvino() -> list[FoundDevice]:
    """Returns OpenVINO's GPUs and NPUs; none without its package, which would replace the ONNX Runtime that is here."""
    if _lacking(OpenVinoProvider):
        return []
    names = [name for name in OpenVinoProvider.devices() if name != "CPU"]
    if not names:
        return [_none("openvino", "OpenVINO", "no GPU or NPU that OpenVINO finds")]
    devices: list[FoundDevice] = []
    for name in names:
        kind: DeviceKind = "npu" if name.startswith("NPU") else GPU
        device = FoundDevice(id=f"openvino:{name}", name=f"OpenVINO {name}", kind=kind, vendor="Intel")
        devices.append(_tried(device, lambda name=name: OpenVinoProvider(name)))
    return devices


def _directml() -> list[FoundDevice]:
    """Returns DirectML's adapters, up to the first that cannot be opened; none without its package."""
    if _lacking(DirectMlProvider):
        return []
    devices: list[FoundDevice] = []
    for index in range(_MAX_ADAPTERS):
        device = FoundDevice(id=f"directml:{index}", name=f"adapter {index} of Direct3D 12")
        device = _tried(device, lambda index=index: DirectMlProvider(index))
        if device.problem and index:
            break
        devices.append(device)
    return devices


def _lacking(provider: type[CudaProvider | OpenVinoProvider | DirectMlProvider]) -> str:
    """Returns the message that names the missing package; empty if none is missing."""
    try:
        provider.check_installed()
    except UsageError as error:
        return str(error)
    return _lacking_onnx(provider)


def _lacking_onnx(provider: type[Provider]) -> str:
    if importlib.util.find_spec("onnx") is None:
        return f"{provider.name} needs onnx: {how_to_install(provider.name)}"
    return ""


def _tried(device: FoundDevice, make: Callable[[], Provider]) -> FoundDevice:
    """Returns `device` with the float types that it computes with, or why it computes with none."""
    provider = make()
    try:
        problem = failure_there(provider, "float32")
    except UsageError as error:
        return replace(device, problem=str(error), missing=True)
    features = () if problem else ("f32",) if failure(provider, "float16") else ("f32", "f16")
    return replace(device, features=features, problem=problem)


def _none(provider: str, name: str, problem: str) -> FoundDevice:
    """Returns the entry for a provider that has no devices here."""
    return FoundDevice(id=provider, name=name, problem=problem, missing=True)
