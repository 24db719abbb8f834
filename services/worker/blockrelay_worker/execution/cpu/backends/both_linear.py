"""A w8a8 linear layer with two backends, our kernels and ONNX Runtime, chosen by the number of rows.

Both give the same bits (`linears`). On CPUs with AMX both use its tiles for many rows, and ONNX Runtime may be faster
there; our kernels are for few rows, since they read the weights faster. A measurement finds the number of rows that
divides them.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.cpu.backends.ort_linear import OrtLinear
from blockrelay_worker.kernels.arguments import F32, U8
from blockrelay_worker.kernels.interface import Linear
from blockrelay_worker.policy import SECOND_BACKEND_COPIES, SECOND_BACKEND_SHARE, WORTHWHILE_SHARE

#: Row counts that are measured, and the most float operations of a measured call; larger counts keep the last result.
ROWS = (1, 4, 16, 64, 128, 256, 512)
_MAX_OPERATIONS = 1 << 38
_ROUNDS = 3
#: More rows than any batch has.
NEVER = 1 << 31


@final
class BothLinear(Linear):
    """A linear layer that uses our kernels below `ort_from` rows, and ONNX Runtime from there on.

    Until `settle`, our kernels serve every number of rows. `shape` is (depth, columns).
    """

    def __init__(self, ours: Linear, ort: OrtLinear, *, shape: tuple[int, int]) -> None:
        self.ours = ours
        self.ort: OrtLinear | None = ort
        self.shape = shape
        self.ort_from = NEVER

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32], scale: NDArray[np.float32] | None = None) -> None:
        if self.ort is not None and rows.shape[0] >= self.ort_from:
            self.ort(rows, out)
        else:
            self.ours(rows, out)

    @property
    def recorded_rows(self) -> int:
        return self.ort_from - 1

    def settle(self, ort_from: int) -> None:
        """Sets the number of rows from which on ONNX Runtime is used. NEVER drops its layer, to free memory."""
        self.ort_from = ort_from
        if ort_from >= NEVER:
            self.ort = None

    def forget_buffers(self) -> None:
        if self.ort is not None:
            self.ort.forget_buffers()


def fits_twice(weight_bytes: int, available: int, kv_bytes: int) -> bool:
    """Returns whether memory suffices for both backends. Pure.

    `available` bytes are free now; `weight_bytes` for our packed weights and `kv_bytes` for KV pages are taken first.
    SECOND_BACKEND_COPIES of the weights must fit into SECOND_BACKEND_SHARE of the rest.
    """
    return SECOND_BACKEND_COPIES * weight_bytes <= SECOND_BACKEND_SHARE * (available - kv_bytes - weight_bytes)


def settle(linears: Iterable[BothLinear]) -> dict[tuple[int, int], int]:
    """Measures both backends for each shape (depth, columns) and sets `ort_from` of all linear layers of this shape.

    Each layer still has both: it was not settled before. Takes seconds. Returns the number of rows from which on ONNX
    Runtime serves (NEVER: for none), by shape. The caller then calls `StageExecutor.linears_changed`: recorded programs
    are out of date. Raises ExecutionError if ONNX Runtime fails.
    """
    by_shape: dict[tuple[int, int], list[BothLinear]] = {}
    for one in linears:
        by_shape.setdefault(one.shape, []).append(one)
    settled: dict[tuple[int, int], int] = {}
    for shape, equal in by_shape.items():
        settled[shape] = ort_from = _measured(shape, equal)
        for one in equal:
            one.settle(ort_from)
    return settled


def faster_from(rows: Sequence[int], seconds: Callable[[int], tuple[float, float]]) -> int:
    """Returns the smallest of `rows` (ascending) from which on ONNX Runtime is worth using at all of them, or NEVER.

    `seconds` measures (our time, ONNX Runtime's time) for a number of rows. It is called from the largest down to the
    first where ONNX Runtime is not worth using.
    """
    ort_from = NEVER
    for count in reversed(rows):
        ours, ort = seconds(count)
        if ort > WORTHWHILE_SHARE * ours:
            break
        ort_from = count
    return ort_from


def _measured(shape: tuple[int, int], linears: Sequence[BothLinear]) -> int:
    """Measures the linear layers of one shape; returns the number of rows from which on ONNX Runtime is worth using."""
    depth, columns = shape
    rows = [count for count in ROWS if count == 1 or 2 * count * depth * columns <= _MAX_OPERATIONS]
    inputs: U8 = np.random.default_rng(1).integers(0, 256, (rows[-1], depth), np.uint8)
    out: F32 = np.empty((rows[-1], columns), np.float32)
    turns = cycle(linears)  # each call uses another layer's weights, as in a step: no cache holds them

    def seconds(count: int) -> tuple[float, float]:
        ours, ort = list[float](), list[float]()
        for _ in range(_ROUNDS + 1):  # the first wakes threads and makes buffers
            one = next(turns)
            assert one.ort is not None, "both are measured before one is dropped"
            ours.append(_seconds(one.ours, inputs[:count], out[:count]))
            ort.append(_seconds(one.ort, inputs[:count], out[:count]))
        return min(ours[1:]), min(ort[1:])

    ort_from = faster_from(rows, seconds)
    for one in linears:
        one.forget_buffers()
    return ort_from


def _seconds(linear: Linear, rows: U8, out: F32) -> float:
    started = time.perf_counter()
    linear(rows, out)
    return time.perf_counter() - started
