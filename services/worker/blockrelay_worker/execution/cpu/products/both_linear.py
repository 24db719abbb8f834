"""A w8a8 product that is there twice, ours and ONNX Runtime's, and from how many rows on which one is faster here.

Both give the same bits (`linears`). CPUs with AMX multiply many rows faster by ONNX Runtime, which uses their tiles,
and few rows by our kernels, which read the weights faster.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.cpu.products.ort_linear import OrtLinear
from blockrelay_worker.kernels.interface import F32, U8, Product

#: Row counts that are measured, and float operations beyond which a product is taken to go on as it did below.
ROWS = (1, 4, 16, 64, 128, 256, 512)
_MOST_OPERATIONS = 1 << 38
#: ONNX Runtime's product is taken where it needs less than this share of the time: it cannot be recorded.
_WORTHWHILE = 0.95
_ROUNDS = 3
#: Share of the memory left that a second packing may take; ONNX Runtime keeps a copy beside its own packing.
_MEMORY_SHARE, _COPIES = 0.25, 2
#: More rows than any batch has.
NEVER = 1 << 31


@final
class BothLinear:
    """Rows below `ort_from` are multiplied by our kernels, `ort_from` rows and more by ONNX Runtime."""

    def __init__(self, ours: Product, ort: OrtLinear, *, shape: tuple[int, int]) -> None:
        self.ours = ours
        self.ort: OrtLinear | None = ort
        self.shape = shape
        self.ort_from = NEVER

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        if self.ort is not None and rows.shape[0] >= self.ort_from:
            self.ort(rows, out)
        else:
            self.ours(rows, out)

    @property
    def recorded_rows(self) -> int:
        """Rows up to which a call is our kernels'."""
        return self.ort_from - 1

    def settle(self, ort_from: int) -> None:
        """From now on ONNX Runtime has so many rows and more; NEVER gives back its memory."""
        self.ort_from = ort_from
        if ort_from >= NEVER:
            self.ort = None

    def forget_buffers(self) -> None:
        """Drop what refers to the caller's buffers: they are about to be replaced."""
        if self.ort is not None:
            self.ort.forget_buffers()


def fits_twice(weight_bytes: int, available: int, kv_bytes: int) -> bool:
    """Whether products may be there twice, in a process that is about to take `weight_bytes` for ours, and `kv_bytes`,
    of the memory available. Pure."""
    return _COPIES * weight_bytes <= _MEMORY_SHARE * (available - kv_bytes - weight_bytes)


def settle(linears: Iterable[BothLinear]) -> dict[tuple[int, int], int]:
    """Measure the products, of which those of equal shape are equal, and settle which serves. Answers, by depth and
    columns, from how many rows on ONNX Runtime does."""
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
    """The fewest of `rows` (rising) from which on ONNX Runtime's product is worth it at all of them. `seconds` answers
    what ours and its take; it is not asked below the first that is not worth it."""
    found = NEVER
    for count in reversed(rows):
        ours, ort = seconds(count)
        if ort > _WORTHWHILE * ours:
            break
        found = count
    return found


def _measured(shape: tuple[int, int], linears: Sequence[BothLinear]) -> int:
    depth, columns = shape
    rows = [count for count in ROWS if count == 1 or 2 * count * depth * columns <= _MOST_OPERATIONS]
    given: U8 = np.random.default_rng(1).integers(0, 256, (rows[-1], depth), np.uint8)
    out: F32 = np.empty((rows[-1], columns), np.float32)
    turns = cycle(linears)  # each call by the weights of another layer, as in a step: no cache has them

    def seconds(count: int) -> tuple[float, float]:
        ours, ort = list[float](), list[float]()
        for _ in range(_ROUNDS + 1):  # the first wakes threads and makes buffers
            one = next(turns)
            assert one.ort is not None, "both are measured before one is given up"
            ours.append(_seconds(one.ours, given[:count], out[:count]))
            ort.append(_seconds(one.ort, given[:count], out[:count]))
        return min(ours[1:]), min(ort[1:])

    found = faster_from(rows, seconds)
    for one in linears:
        one.forget_buffers()
    return found


def _seconds(product: Product, rows: U8, out: F32) -> float:
    started = time.perf_counter()
    product(rows, out)
    return time.perf_counter() - started
