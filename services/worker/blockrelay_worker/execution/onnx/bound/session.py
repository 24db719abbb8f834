"""A session whose weights and pools stay bound to it: a step brings the rest."""

from collections.abc import Mapping
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from blockrelay_worker.execution.onnx.providers.provider import Place

#: Of what stays on the device OrtValues.
Arrays = dict[str, Any]


class BoundSession:
    """Of one graph of `graphs.stage`. Used by one thread at a time."""

    def __init__(
        self, session: ort.InferenceSession, values: Mapping[str, ort.OrtValue], pools: Mapping[str, ort.OrtValue]
    ) -> None:
        """`values` and `pools` on the device by name, of which the graph takes what it has inputs for; it writes the
        pools in place (`NAME_out`)."""
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
        """The outputs by name, but for the pools. They are in memory of the host, so that the device has done it; those
        that are to stay are where `stays` says."""
        binding = self._binding
        for name in self._given:
            binding.bind_cpu_input(name, inputs[name])
        for name, value in self._pools.items():
            binding.bind_ortvalue_output(name, value)
        for name in self._outputs:
            binding.bind_output(name, *(stays or {}).get(name, ("cpu", 0)))
        try:
            self._session.run_with_iobinding(binding, options)
            found = binding.get_outputs()[-len(self._outputs) :]
            return {
                name: value if name in (stays or {}) else value.numpy()
                for name, value in zip(self._outputs, found, strict=True)
            }
        finally:
            binding.clear_binding_outputs()
