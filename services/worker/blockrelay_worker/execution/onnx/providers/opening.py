"""The provider of a device, chosen by the name that people give the device."""

import os
import re
from collections.abc import Mapping

from blockrelay.errors import UsageError
from blockrelay.typed_command import typed
from blockrelay_worker.execution.onnx.installation import check_one_onnxruntime
from blockrelay_worker.execution.onnx.providers.cuda import CudaProvider
from blockrelay_worker.execution.onnx.providers.directml import DirectMlProvider
from blockrelay_worker.execution.onnx.providers.nvidia_driver import nvidia_gpus
from blockrelay_worker.execution.onnx.providers.openvino import OpenVinoProvider
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from blockrelay_worker.execution.onnx.providers.webgpu import WebGpuProvider

#: `webgpu` alone is its first device. OpenVINO names its devices itself: GPU.1, for example.
_DEVICE = re.compile(r"(?:(cuda|webgpu|directml)(?::(\d+))?|(openvino):([A-Z]+(?:\.\d+)?)|(GPU-[0-9a-f-]+))", re.ASCII)
#: OpenVINO's CPU is not offered: workers have kernels of their own for CPUs.
_CPU = "CPU"


def open_provider(device: str, environment: Mapping[str, str] = os.environ) -> Provider:
    """Returns the provider of a device such as cpu, webgpu:0 or openvino:NPU, or of NVIDIA's GPU whose UUID begins with
    `device`. The CUDA_VISIBLE_DEVICES of `environment` decides which of NVIDIA's GPUs are here.

    Raises UsageError for another name or the beginning of several UUIDs, if the device is not here, if its package is
    missing, or if two ONNX Runtimes are installed. DirectML does not list its adapters: a missing one shows at its
    first session.
    """
    check_one_onnxruntime()
    if device == CpuProvider.name:
        return CpuProvider()
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise UsageError(f"{device!r} is not a device of ONNX Runtime: give webgpu:0, for example")
    numbered, number, _, of_openvino, uuid = match.groups()
    if numbered == "cuda" or uuid:
        return _cuda(device, int(number or 0), uuid, environment)
    if numbered == "webgpu":
        there = [f"webgpu:{index}" for index in range(len(WebGpuProvider.devices()))]
        _check_there(f"webgpu:{int(number or 0)}", there)
        return WebGpuProvider(int(number or 0))
    if numbered == "directml":
        DirectMlProvider.check_installed()
        return DirectMlProvider(int(number or 0))
    _check_there(device, [f"openvino:{name}" for name in OpenVinoProvider.devices() if name != _CPU])
    return OpenVinoProvider(of_openvino)


def _cuda(device: str, index: int, uuid: str | None, environment: Mapping[str, str]) -> CudaProvider:
    """Returns the provider of the GPU `index`, or of the one whose UUID begins with `uuid`. Raises UsageError if there
    is none."""
    CudaProvider.check_installed()
    gpus = nvidia_gpus(environment)
    there = [f"cuda:{number} ({gpu.uuid})" for number, gpu in enumerate(gpus)]
    if uuid is not None:
        named = [number for number, gpu in enumerate(gpus) if gpu.uuid.startswith(uuid)]
        if len(named) > 1:
            raise UsageError(f"{uuid} is the beginning of several UUIDs: {', '.join(there)}")
        index = named[0] if named else len(gpus)
    if index >= len(gpus):
        raise _not_there(device, there)
    return CudaProvider(index, gpus[index])


def _check_there(device: str, there: list[str]) -> None:
    if device not in there:
        raise _not_there(device, there)


def _not_there(device: str, there: list[str]) -> UsageError:
    """Returns a one-line error that lists the devices that are here."""
    others = ", ".join(there) or "none of its kind"
    return UsageError(f"there is no device {device} here, but {others} (see {typed('devices')})")
