"""A session with weights and KV pools bound to it, so that a step passes only its own inputs."""

from collections.abc import Mapping
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from blockrelay_worker.execution.onnx.providers.provider import Place

#: Outputs by name: NumPy arrays, or OrtValues for those that stay on the device.
Arrays = dict[str, Any]


class BoundSession:
    """A session of one graph whose inputs and outputs are bound once. Used by one thread at a time."""

    def __init__(
        self, session: ort.InferenceSession, values: Mapping[str, ort.OrtValue], pools: Mapping[str, ort.OrtValue]
    ) -> None:
        """`values` and `pools` are on the device, by name; those that are inputs of the graph are bound. The graph
        writes the pools in place (`NAME_out`)."""
        self._session, self._binding = session, session.io_binding()
        names = [one.name for one in session.get_inputs()]
        bound = {**values, **pools}
        for name in names:
            if name in bound:
                self._binding.bind_ortvalue_input(name, bound[name])
        self._given = [name for name in names if name not in bound]
        outputs = [one.name for one in session.get_outputs()]
        self._pools = {f"{name}_out": value for name, value in pools.items() if f"{name}_out" in outputs}
        self._outputs = [name for name in outputs if name not in self._pools]

    def run(
        self,
        inputs: Mapping[str, NDArray[Any]],
        options: ort.RunOptions | None,
        stays: Mapping[str, Place] | None = None,
    ) -> Arrays:
        """Runs the graph and returns its outputs by name, without the pools. They are copied to the host, so the device
        has finished; outputs named in `stays` are left in the memory that it gives for them. `inputs` has at least what
        is not bound. Raises what ONNX Runtime raises."""
        binding = self._binding
        for name in self._given:
            binding.bind_cpu_input(name, inputs[name])
        for name, value in self._pools.items():
            binding.bind_ortvalue_output(name, value)
        for name in self._outputs:
            binding.bind_output(name, *(stays or {}).get(name, ("cpu", 0)))
        try:
            self._session.run_with_iobinding(binding, options)
            values = binding.get_outputs()[len(self._pools) :]
            return {
                name: value if name in (stays or {}) else value.numpy()
                for name, value in zip(self._outputs, values, strict=True)
            }
        finally:
            binding.clear_binding_outputs()
