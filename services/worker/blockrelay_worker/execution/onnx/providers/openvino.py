"""Intel's GPUs and NPUs through OpenVINO, with `onnxruntime-openvino`.

Written from its documents; never run by us on either. On the CPU, which OpenVINO has too, a stage gave its known
answers.
"""

import importlib
from collections.abc import Sequence

import onnxruntime as ort

from blockrelay_worker.execution.onnx.providers.provider import Chosen, Provider, only_there


class OpenVinoProvider(Provider):
    """A device of OpenVINO's, by the name it has there. Its inputs and outputs lie in the host's memory."""

    name, ort_name, needs = "openvino", "OpenVINOExecutionProvider", "onnxruntime-openvino"
    saves_graphs = False  # OpenVINO compiles graphs itself, and has a cache of its own

    def __init__(self, device: str) -> None:
        """Opens the device `openvino:<device>`, such as GPU, GPU.1 or NPU."""
        self.device, self._name = f"openvino:{device}", device

    @classmethod
    def devices(cls) -> list[str]:
        """Returns the names of OpenVINO's devices, its CPU among them. Raises UsageError if it is not installed."""
        cls.check_installed()
        bindings = importlib.import_module("onnxruntime.capi._pybind_state")  # the only place with the list
        return [str(one) for one in bindings.get_available_openvino_device_ids()]

    @property
    def identity(self) -> tuple[str, ...]:
        """What decides the bits it computes, as far as we know: provider, version of ONNX Runtime, device name."""
        return (*super().identity, self._name)

    def add_to(self, options: ort.SessionOptions, *, capture: bool = False) -> Sequence[Chosen]:
        """Sets up `options` for a session on this device alone; returns the provider to pass beside them. `capture` is
        ignored: this provider records no steps."""
        only_there(options)
        chosen = {
            "device_type": self._name,
            "precision": "ACCURACY",  # the graph's float type; a GPU would compute in float16
            "num_of_threads": "1",
        }
        if self.compiled is not None and (folder := self.compiled.own_folder("openvino", self.identity)) is not None:
            chosen["cache_dir"] = str(folder)
        return [(self.ort_name, chosen)]
