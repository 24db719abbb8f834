"""Any GPU of Windows that Direct3D 12 reaches, with `onnxruntime-directml`. Written from its documents; never run by
us."""

from collections.abc import Sequence

import onnxruntime as ort

from blockrelay_worker.execution.onnx.providers.provider import Chosen, Provider, only_there


class DirectMlProvider(Provider):
    """A DXGI adapter."""

    name, ort_name, needs = "directml", "DmlExecutionProvider", "Windows, and onnxruntime-directml"
    fuses_last = captures = True

    def __init__(self, index: int) -> None:
        """Names the device `directml:<index>`, counted as DXGI does. Nothing is opened: `session` fails if it is not
        there."""
        self.device, self._index = f"directml:{index}", index
        self.place = ("dml", index)

    def add_to(self, options: ort.SessionOptions, *, capture: bool = False) -> Sequence[Chosen]:
        only_there(options)
        options.enable_mem_pattern = False  # DirectML supports neither memory patterns nor parallel execution
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        if capture:
            options.add_session_config_entry("ep.dml.enable_graph_capture", "1")
        return [(self.ort_name, {"device_id": self._index})]
