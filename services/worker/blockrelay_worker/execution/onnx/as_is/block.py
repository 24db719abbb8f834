"""One ONNX block that others made, on a device, with its KV in the stage's pools."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import GraphProto

from blockrelay.onnx_blocks.model_file import model_without_weights, name_real_files
from blockrelay.onnx_blocks.served_shape import ServedShape
from blockrelay.onnx_blocks.wiring import Wiring
from blockrelay_worker.execution.onnx.as_is.paged_graph import TAKEN, put_into_pages
from blockrelay_worker.execution.onnx.graphs.graph import MICROSOFT
from blockrelay_worker.execution.onnx.providers.provider import Place, Provider, Steps

#: An input or output of a block, on the device or in the host's memory.
Value = NDArray[Any] | ort.OrtValue
#: The attention operator in onnxruntime-genai's models.
_ATTENTION = "GroupQueryAttention"
#: Types of outputs that may stay on the device.
_KEPT = ("tensor(float16)", "tensor(float)")


class AsIsBlock:
    """A session of one block. One thread uses it."""

    def __init__(
        self,
        provider: Provider,
        root: Path,
        wiring: Wiring,
        shape: ServedShape,
        index: int,
        *,
        steps: Steps = "many",
    ) -> None:
        """Opens block `index`, counted from 1, of the folder `root`, for `steps` steps. ONNX Runtime maps the weights
        from the files there.

        Raises OnnxBlocksError for a file that cannot be read, UsageError if this machine lacks something, and what ONNX
        Runtime raises.
        """
        signature = wiring.blocks[index - 1]
        self.name = signature.block
        model = model_without_weights(root / signature.file, signature.file)
        self._pools = {f"{pool}_out": pool for pool in put_into_pages(model, wiring, shape, index)}
        weights = name_real_files(model, root)
        self._session = provider.mixed_session(model.SerializeToString(), weights, steps)
        self._binding = self._session.io_binding()
        self._inputs = [one.name for one in self._session.get_inputs()]
        host: Place = ("cpu", 0)
        self._outputs = {
            one.name: provider.place or host if one.type in _KEPT and one.name != TAKEN else host
            for one in self._session.get_outputs()
        }
        """The memory in which each output stays if it is no pool."""

    @property
    def session(self) -> ort.InferenceSession:
        """The session, for allocations on its device."""
        return self._session

    def run(self, given: Mapping[str, Value], pools: Mapping[str, ort.OrtValue]) -> dict[str, Value]:
        """Runs the block and returns its outputs by name, without the presents, which go to the `pools`. Floats stay on
        the device if it has memory for outputs; logits come to the host. `given` may have more than the block takes.
        Raises what ONNX Runtime raises."""
        binding = self._binding
        try:
            for name in self._inputs:
                value = pools[name] if name in pools else given[name]
                if isinstance(value, ort.OrtValue):
                    binding.bind_ortvalue_input(name, value)
                else:
                    # Not ascontiguousarray: it makes a scalar an array of one dimension.
                    binding.bind_cpu_input(name, np.asarray(value, order="C"))
            for name, place in self._outputs.items():
                if name in self._pools:
                    binding.bind_ortvalue_output(name, pools[self._pools[name]])
                else:
                    binding.bind_output(name, *place)
            self._session.run_with_iobinding(binding)
            binding.synchronize_outputs()
            outputs = zip(self._outputs, binding.get_outputs(), strict=True)
            return {name: value for name, value in outputs if name not in self._pools}
        finally:
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()


def attends_one_by_one(graph: GraphProto) -> bool:
    """Returns whether the graph's attention takes several new tokens of a sequence only without a past."""
    return any(node.op_type == _ATTENTION and node.domain == MICROSOFT for node in graph.node)


def on_host(value: Value) -> NDArray[Any]:
    """Returns the value in the host's memory: a copy, or the value's own memory if it is there."""
    return value.numpy() if isinstance(value, ort.OrtValue) else value
