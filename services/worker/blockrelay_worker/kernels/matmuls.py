"""Matmuls of the native kernels: the weights are packed once into a private copy on huge pages."""

from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay_worker.kernels import arguments
from blockrelay_worker.kernels.buffers import huge_page_bytes
from blockrelay_worker.kernels.interface import F16, F32, I8, U8
from blockrelay_worker.kernels.recorded import Value

#: Columns of a panel, k of a group, and bytes of a group in a panel, as in matmul.h and group_matmul.h.
_PANEL, _GROUP, _GROUP_BYTES = 32, 32, 576
#: Largest depth whose sums of 255 * 128 fit into int32.
_MAX_DEPTH = 65536


class Caller(Protocol):
    """Calls a function of the shared object, or records the call. Raises ExecutionError for a bad status."""

    def call(self, name: str, *values: Value) -> None: ...


@final
class ChannelMatmul:
    """The w8a8 matmul with weights q [K,N] int8 and column scales [N] (matmul.h). Implements `interface.Matmul`.

    It copies `q` and keeps `scale`. Making and calling it raise ExecutionError for an array of another dtype or shape.
    """

    def __init__(self, caller: Caller, q: I8, scale: F32) -> None:
        self._depth, self._columns = _shape("q", q)
        arguments.check("q", q, arguments.INT8, q.shape)
        arguments.check("scale", scale, arguments.FLOAT32, (self._columns,))
        padded = -(-self._columns // _PANEL) * _PANEL
        self._panels = huge_page_bytes(padded * (-(-self._depth // 4) * 4))
        self._start = np.empty(padded, np.int32)
        self._scale = scale
        self._caller = caller
        caller.call("pack_weights", q, self._depth, self._columns, self._panels, self._start)

    def __call__(self, rows: U8, out: F32) -> None:
        count = _check(rows, out, self._depth, self._columns)
        if count:
            weights = (self._panels, self._start, self._scale)
            self._caller.call("multiply", rows, *weights, out, count, self._depth, self._columns)


@final
class GroupMatmul:
    """The w4a8 matmul with nibbles q4 [K/2,N] uint8, gs [K/32,N] float16 and column scales [N] (group_matmul.h).

    Implements `interface.Matmul`. It copies `q4` and `gs` and keeps `scale`. Making and calling it raise ExecutionError
    for an array of another dtype or shape.
    """

    def __init__(self, caller: Caller, q4: U8, gs: F16, scale: F32) -> None:
        half, self._columns = _shape("q4", q4)
        self._depth = 2 * half
        if self._depth % _GROUP:
            raise ExecutionError(
                f"kernel argument q4: {self._depth} values are not a whole number of groups of {_GROUP}"
            )
        arguments.check("q4", q4, arguments.UINT8, q4.shape)
        arguments.check("gs", gs, arguments.FLOAT16, (self._depth // _GROUP, self._columns))
        arguments.check("scale", scale, arguments.FLOAT32, (self._columns,))
        self._panels = huge_page_bytes(-(-self._columns // _PANEL) * (self._depth // _GROUP) * _GROUP_BYTES)
        self._scale = scale
        self._caller = caller
        caller.call("pack_groups", q4, gs, self._depth, self._columns, self._panels)

    def __call__(self, rows: U8, out: F32) -> None:
        count = _check(rows, out, self._depth, self._columns)
        if count:
            weights = (self._panels, self._scale)
            self._caller.call("multiply_groups", rows, *weights, out, count, self._depth, self._columns)


def _shape(name: str, weights: NDArray[Any]) -> tuple[int, int]:
    if weights.ndim != 2 or 0 in weights.shape or weights.shape[0] > _MAX_DEPTH:
        raise ExecutionError(
            f"kernel argument {name}: expected a matrix of at most {_MAX_DEPTH} rows, whose sums fit into int32, "
            f"got {list(weights.shape)}"
        )
    return weights.shape[0], weights.shape[1]


def _check(rows: U8, out: F32, depth: int, columns: int) -> int:
    """Checks the buffers of a call and returns the number of rows. Raises ExecutionError for wrong buffers."""
    count = rows.shape[0]
    arguments.check("rows", rows, arguments.UINT8, (count, depth))
    arguments.check("out", out, arguments.FLOAT32, (count, columns))
    return count
