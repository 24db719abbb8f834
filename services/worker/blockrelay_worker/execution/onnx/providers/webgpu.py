"""The provider for any GPU that Vulkan, Metal or D3D12 reaches, through the plug-in `onnxruntime-ep-webgpu`."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import DTypeLike

from blockrelay.errors import UsageError
from blockrelay.extras import how_to_install
from blockrelay_worker.execution.onnx.providers.provider import ERRORS, Chosen, Provider, only_there

#: Bytes of the largest buffer that every device allows.
_LEAST_LIMIT = 256 << 20


class WebGpuProvider(Provider):
    """A device of the WebGPU plug-in."""

    name, ort_name = "webgpu", "WebGpuExecutionProvider"
    has_paged_attention = adds_in_float16 = True
    place = ("webgpu", 0)
    _registered = False

    def __init__(self, index: int) -> None:
        """Opens the device `webgpu:<index>`. `index` counts from 0 and must be below the number of `devices()`.

        Raises UsageError without the plug-in.
        """
        self.device, self._device = f"webgpu:{index}", self.devices()[index]
        # Recording does not pay with a driver that computes on the CPU. Its outputs cost no wait either, and to join
        # them takes longer than to copy each.
        self.captures = self.waits_for_outputs = self._device.device.type == ort.OrtHardwareDeviceType.GPU

    @classmethod
    def devices(cls) -> list[Any]:
        """Returns the plug-in's devices on this machine, as OrtEpDevice objects of ONNX Runtime.

        Raises UsageError without the plug-in.
        """
        try:
            plugin: Any = importlib.import_module("onnxruntime_ep_webgpu")
        except ModuleNotFoundError:
            raise UsageError(f"webgpu needs the plug-in: {how_to_install('webgpu')}") from None
        if not cls._registered:
            ort.set_default_logger_severity(ERRORS)
            ort.register_execution_provider_library("webgpu", plugin.get_library_path())
            cls._registered = True
        return [device for device in ort.get_ep_devices() if device.ep_name == plugin.get_ep_name()]

    @property
    def identity(self) -> tuple[str, ...]:
        """All that decides the bits it computes, but for the driver, which ONNX Runtime does not name."""
        device, hardware = self._device, self._device.device
        version = device.ep_metadata.get("version", "")
        return (*super().identity, version, f"{hardware.type} {hardware.vendor_id:x}:{hardware.device_id:x}")

    def add_to(self, options: ort.SessionOptions, *, capture: bool = False) -> Sequence[Chosen]:
        """Selects this device in a session's `options`. Returns no providers to pass beside them: none are needed.
        `capture`: runs of the session are recorded on the device."""
        only_there(options)
        options.add_provider_for_devices([self._device], {"enableGraphCapture": "1"} if capture else {})
        return []

    def empty(self, session: ort.InferenceSession, shape: Sequence[int], dtype: DTypeLike) -> ort.OrtValue:
        """Returns zeros on the device, allocated by `session`. Raises UsageError for a buffer larger than the device
        allows."""
        zeros = np.zeros(shape, dtype)
        value = session.create_ortvalue_from_shape_and_type(list(shape), zeros.dtype.type, "webgpu")
        value.update_inplace(zeros)
        if zeros.nbytes > _LEAST_LIMIT:
            try:
                value.numpy()  # a buffer that is too large does not exist, and only reading it shows that
            except Exception as error:
                raise UsageError(
                    f"{self.device} has no buffer of {zeros.nbytes:,} bytes, as {list(shape)} in {zeros.dtype} takes: "
                    "it cannot hold a stage with a block so large, or with so many pages"
                ) from error
        return value
