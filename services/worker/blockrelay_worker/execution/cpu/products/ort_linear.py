"""Matrix products of ONNX Runtime, a session for each matrix, all on one pool of threads (`ort_runtime`)."""

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.cpu.products.ort_runtime import OrtRuntime

#: Bindings are kept for row counts up to this one; larger products take so long that making a new one does not show.
_KEPT_BINDINGS = 64


@final
class OrtLinear:
    """A skeleton graph over weights as they are mapped."""

    def __init__(self, graph: bytes, weights: Mapping[str, NDArray[Any]], *, runtime: OrtRuntime) -> None:
        """`weights` are the graph's initializers by name, matrix first. ONNX Runtime repacks them.

        Raises ExecutionError if ONNX Runtime refuses the graph.
        """
        self.weight_type = next(iter(weights.values())).dtype
        self._session = runtime.session(graph, weights)
        self._bindings: dict[tuple[int, int, int], Callable[[], None]] = {}

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        """Multiply `rows` (uint8 with zero point 128, or float32; contiguous [R, K], R >= 1) into `out` [R, N]."""
        key = (rows.ctypes.data, out.ctypes.data, rows.shape[0])
        product = self._bindings.get(key)
        if product is None:
            product = self._session.bind(rows, out)
            if rows.shape[0] <= _KEPT_BINDINGS:
                self._bindings[key] = product
        product()

    @property
    def recorded_rows(self) -> int:
        """No number of rows: these calls are not our kernels'."""
        return 0

    def forget_buffers(self) -> None:
        """Drop what refers to the caller's buffers: they are about to be replaced."""
        self._bindings.clear()
