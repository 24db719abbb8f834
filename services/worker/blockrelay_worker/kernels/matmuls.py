"""Matmuls of the native kernels: the weights are packed once into a private copy on huge pages."""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay_worker.kernels import arguments
from blockrelay_worker.kernels.arguments import F16, F32, I8, U8
from blockrelay_worker.kernels.buffers import huge_page_bytes
from blockrelay_worker.kernels.interface import Kernels, Linear

#: Columns of a panel, most k of a step, k of a group, and bytes of a group in a panel, as in packed_weights.h and
#: packed_groups.h.
_PANEL, _STEP, _GROUP, _GROUP_BYTES = 32, 8, 32, 640
#: Largest depth whose sums of 255 * 128 fit into int32.
_MAX_DEPTH = 65536
#: More rows than any batch has.
_ALL_ROWS = 1 << 31


@final
class PackedMatmul(Linear):
    """A matmul with packed weights: rows uint8 [R,K], with zero point 128, -> out float32 [R,N].

    Where `group` is not 0 it takes the rows' scales, [R,K/group]. A call raises ExecutionError for a buffer that is not
    C-contiguous, or has another dtype or shape, and for scales that are missing or not taken.
    """

    def __init__(
        self,
        kernels: Kernels,
        multiply: str,
        weights: tuple[NDArray[Any], ...],
        shape: tuple[int, int],
        *,
        group: int = 0,
    ) -> None:
        """`multiply` is the name of the kernel, `weights` its arguments before out; `shape` is (K, N)."""
        self._call, self._multiply, self._weights = kernels.call, multiply, weights
        self._depth, self._columns = shape
        self._group = group

    def __call__(self, rows: NDArray[Any], out: F32, scale: F32 | None = None) -> None:
        count, depth, columns = rows.shape[0], self._depth, self._columns
        arguments.check("rows", rows, arguments.UINT8, (count, depth))
        arguments.check("out", out, arguments.FLOAT32, (count, columns))
        if (scale is None) != (not self._group):
            raise ExecutionError(f"kernel argument scale: {self._multiply} takes {'one' if self._group else 'none'}")
        if scale is not None:
            arguments.check("scale", scale, arguments.FLOAT32, arguments.scale_shape(count, depth, self._group))
        if count:
            given = (rows,) if scale is None else (rows, scale)
            self._call(self._multiply, *given, *self._weights, out, count, depth, columns)

    @property
    def recorded_rows(self) -> int:
        """More rows than any batch has: every call uses our kernels."""
        return _ALL_ROWS


def channel_matmul(kernels: Kernels, q: I8, scale: F32) -> PackedMatmul:
    """Makes the w8a8 matmul with weights q [K,N] int8 and column scales [N] (matmul.h).

    It copies `q` and keeps `scale`. K is 65,536 at most, so that sums fit into int32. `kernels.has_matmul` must be
    True. Raises ExecutionError for a larger or empty matrix, and for an array that is not C-contiguous or has another
    dtype or shape.
    """
    depth, columns = _shape("q", q)
    arguments.check("q", q, arguments.INT8, q.shape)
    arguments.check("scale", scale, arguments.FLOAT32, (columns,))
    padded = -(-columns // _PANEL) * _PANEL
    panels = huge_page_bytes(padded * (-(-depth // _STEP) * _STEP))
    start = np.empty(padded, np.int32)
    kernels.call("pack_weights", q, depth, columns, panels, start)
    return PackedMatmul(kernels, "multiply", (panels, start, scale), (depth, columns))


def group_matmul(kernels: Kernels, q4: U8, gs: F16, gm: F16) -> PackedMatmul:
    """Makes the w4a8 matmul with nibbles q4 [K/2,N], and gs and gm [K/32,N] in float16 (group_matmul.h).

    It copies all three. K is a multiple of 32, and 131,072 at most. `kernels.has_matmul` must be True. Raises
    ExecutionError for another K, an empty matrix, and an array that is not C-contiguous or has another dtype or shape.
    """
    half, columns = _shape("q4", q4)
    depth = 2 * half
    if depth % _GROUP:
        raise ExecutionError(f"kernel argument q4: {depth} values are not a whole number of groups of {_GROUP}")
    arguments.check("q4", q4, arguments.UINT8, q4.shape)
    arguments.check("gs", gs, arguments.FLOAT16, (depth // _GROUP, columns))
    arguments.check("gm", gm, arguments.FLOAT16, (depth // _GROUP, columns))
    panels = huge_page_bytes(-(-columns // _PANEL) * (depth // _GROUP) * _GROUP_BYTES)
    kernels.call("pack_groups", q4, gs, gm, depth, columns, panels)
    return PackedMatmul(kernels, "multiply_groups", (panels,), (depth, columns), group=_GROUP)


def _shape(name: str, weights: NDArray[Any]) -> tuple[int, int]:
    if weights.ndim != 2 or 0 in weights.shape or weights.shape[0] > _MAX_DEPTH:
        raise ExecutionError(
            f"kernel argument {name}: expected a matrix of at most {_MAX_DEPTH} rows, whose sums fit into int32, "
            f"got {list(weights.shape)}"
        )
    return weights.shape[0], weights.shape[1]
