"""Linear layers computed by ONNX Runtime: one session per matrix, all on one pool of threads (`ort_runtime`)."""

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.cpu.backends.ort_runtime import OrtRuntime
from blockrelay_worker.kernels.interface import Linear

#: Largest number of rows for which bindings are kept. Larger calls take so long that a new binding does not matter.
_KEPT_BINDINGS = 64


@final
class OrtLinear(Linear):
    """A linear layer in ONNX Runtime: a graph of the block folder, with the weights as arrays.

    Buffers of calls with at most 64 rows stay bound by their addresses: call `forget_buffers` before they are freed.
    A call raises ExecutionError if ONNX Runtime fails.
    """

    def __init__(self, graph: bytes, weights: Mapping[str, NDArray[Any]], *, runtime: OrtRuntime) -> None:
        """Makes the session. `weights` are the graph's initializers by name, matrix first; ONNX Runtime repacks them.

        Weights are contiguous, in float32, uint8 or int8. Raises ExecutionError if ONNX Runtime refuses the graph.
        """
        self.weight_type = next(iter(weights.values())).dtype
        self._session = runtime.session(graph, weights)
        self._bindings: dict[tuple[int, int, int], Callable[[], None]] = {}

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32], scale: NDArray[np.float32] | None = None) -> None:
        key = (rows.ctypes.data, out.ctypes.data, rows.shape[0])
        multiply = self._bindings.get(key)
        if multiply is None:
            multiply = self._session.bind(rows, out)
            if rows.shape[0] <= _KEPT_BINDINGS:
                self._bindings[key] = multiply
        multiply()

    def forget_buffers(self) -> None:
        self._bindings.clear()
