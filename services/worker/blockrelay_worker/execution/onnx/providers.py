"""ONNX Runtime's execution providers: sessions that run on one device, wholly or not at all, and memory there.

The only module of the worker that knows providers. A session of ONNX Runtime falls back to its CPU provider in silence,
where a library is missing or a node has no kernel: here it never does.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort
from numpy.typing import DTypeLike, NDArray

from blockrelay.errors import UsageError
from blockrelay_worker.execution.onnx.installation import check_one_onnxruntime

#: A provider by its name, or with options, as ONNX Runtime takes it.
Chosen = str | tuple[str, dict[Any, Any]]
#: What ONNX Runtime writes to stderr: errors and worse (everything else is told by exceptions), or nothing.
_ERRORS, _NOTHING = 3, 4


class Provider(ABC):
    """One device by one provider. Used by one thread."""

    name: ClassVar[str]
    """As people write it: the part of `webgpu:0` before the colon."""
    device: str
    """As people write it, `webgpu:0` for example."""
    ort_name: ClassVar[str]

    @abstractmethod
    def add_to(self, options: ort.SessionOptions) -> Sequence[Chosen]:
        """Choose the device for a session with these options; the providers to pass beside them."""
        ...

    @abstractmethod
    def empty(self, session: ort.InferenceSession, shape: Sequence[int], dtype: DTypeLike) -> ort.OrtValue:
        """Zeros on the device, in memory that lives as long as the value, even when the session has gone."""
        ...

    @property
    def identity(self) -> tuple[str, ...]:
        """What decides how it computes: part of the numerics id."""
        return (self.ort_name, ort.__version__)

    def session(self, graph: bytes, *, quiet: bool = False) -> ort.InferenceSession:
        """A session that has every node of the graph on the device. Raises what ONNX Runtime raises where one cannot be
        there. `quiet`: it may fail."""
        options = ort.SessionOptions()
        options.log_severity_level = _NOTHING if quiet else _ERRORS
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        chosen = self.add_to(options)
        made = ort.InferenceSession(graph, options, providers=list(chosen) or None, enable_fallback=0)
        found = made.get_providers()
        if found[0] != self.ort_name:
            raise UsageError(f"ONNX Runtime gave {found[0]} where {self.ort_name} was asked for")
        return made

    def shrinking(self) -> ort.RunOptions | None:
        """Options of a run behind which the session gives memory back that it does not use; None where nobody can."""
        return None

    def upload(self, session: ort.InferenceSession, array: NDArray[Any]) -> ort.OrtValue:
        """A copy of `array` on the device."""
        value = self.empty(session, array.shape, array.dtype)
        value.update_inplace(np.ascontiguousarray(array))
        return value


class CpuProvider(Provider):
    """ONNX Runtime's own CPU kernels: a reference, and for tests. Never the class gpu of a worker that serves."""

    name, ort_name = "cpu", "CPUExecutionProvider"
    device = "cpu"

    def add_to(self, options: ort.SessionOptions) -> Sequence[Chosen]:
        return [self.ort_name]

    def empty(self, session: ort.InferenceSession, shape: Sequence[int], dtype: DTypeLike) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype))

    def shrinking(self) -> ort.RunOptions | None:
        options = ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return options


class WebGpuProvider(Provider):
    """The plug-in `onnxruntime-ep-webgpu`: any GPU that Vulkan, Metal or D3D12 reaches."""

    name, ort_name = "webgpu", "WebGpuExecutionProvider"
    _registered = False

    def __init__(self, index: int) -> None:
        """The device `webgpu:<index>`. Raises UsageError for one that is not there."""
        found = self.devices()
        if index >= len(found):
            raise UsageError(f"there is no device webgpu:{index} here, only {len(found)} of them")
        self.device, self._device = f"webgpu:{index}", found[index]

    @classmethod
    def devices(cls) -> list[Any]:
        """Those of this machine."""
        try:
            plugin: Any = importlib.import_module("onnxruntime_ep_webgpu")
        except ModuleNotFoundError:
            raise UsageError("webgpu needs the plug-in: pip install 'blockrelay[webgpu]'") from None
        if not cls._registered:
            ort.set_default_logger_severity(_ERRORS)
            ort.register_execution_provider_library("webgpu", plugin.get_library_path())
            cls._registered = True
        return [device for device in ort.get_ep_devices() if device.ep_name == plugin.get_ep_name()]

    @property
    def identity(self) -> tuple[str, ...]:
        """The driver is not in it: ONNX Runtime does not tell."""
        device, hardware = self._device, self._device.device
        version = device.ep_metadata.get("version", "")
        return (*super().identity, version, f"{hardware.type} {hardware.vendor_id:x}:{hardware.device_id:x}")

    def add_to(self, options: ort.SessionOptions) -> Sequence[Chosen]:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        options.add_provider_for_devices([self._device], {})
        return []

    def empty(self, session: ort.InferenceSession, shape: Sequence[int], dtype: DTypeLike) -> ort.OrtValue:
        value = session.create_ortvalue_from_shape_and_type(list(shape), np.dtype(dtype).type, "webgpu")
        value.update_inplace(np.zeros(shape, dtype))
        return value


class DirectMlProvider(Provider):
    """`onnxruntime-directml`, on Windows: any GPU that Direct3D 12 reaches. Written by its documents, never run."""

    name, ort_name = "directml", "DmlExecutionProvider"

    def __init__(self, index: int) -> None:
        """The device `directml:<index>`, as DXGI counts. Raises UsageError where this ONNX Runtime has no DirectML."""
        if self.ort_name not in ort.get_available_providers():
            raise UsageError(
                "directml needs Windows, and onnxruntime-directml in an environment of its own: "
                "pip install 'blockrelay[directml]', and --gpu-python for the worker"
            )
        self.device, self._index = f"directml:{index}", index

    def add_to(self, options: ort.SessionOptions) -> Sequence[Chosen]:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        options.enable_mem_pattern = False  # DirectML has neither this nor parallel execution
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        return [(self.ort_name, {"device_id": self._index})]

    def empty(self, session: ort.InferenceSession, shape: Sequence[int], dtype: DTypeLike) -> ort.OrtValue:
        value = ort.OrtValue.ortvalue_from_shape_and_type(list(shape), np.dtype(dtype).type, "dml", self._index)
        value.update_inplace(np.zeros(shape, dtype))
        return value


_GPUS: dict[str, Callable[[int], Provider]] = {"webgpu": WebGpuProvider, "directml": DirectMlProvider}


def open_provider(device: str) -> Provider:
    """The provider of a device such as webgpu:0. Raises UsageError, for two ONNX Runtimes in one environment too."""
    check_one_onnxruntime()
    name, _, index = device.partition(":")
    if name == "cpu":
        return CpuProvider()
    if name in _GPUS and (index or "0").isdigit():
        return _GPUS[name](int(index or 0))
    raise UsageError(f"{device!r} is no device of ONNX Runtime: webgpu:0, for example")
