"""Matrix products of ONNX Runtime, computed by the threads of our kernels.

A session with threads of its own keeps them for every matrix: a model of 32 layers had 1,935 on 16 cores. The pool that
ONNX Runtime shares between sessions cannot be told from Python not to spin for 20 ms after each product, which takes
the cores from the kernels (a decode step took three times as long). So no session has threads: large matrices are cut
into columns, a session each, many rows into ranges, and the threads of the kernels run the parts.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from blockrelay_worker.execution.cpu.products.fewer_columns import with_columns
from blockrelay_worker.kernels.buffers import untouched_bytes
from blockrelay_worker.kernels.interface import Kernels

#: Bindings are kept for row counts up to this one; larger products take so long that making a new one does not show.
_KEPT_BINDINGS = 64
#: Bytes of weights that are worth a session of their own, and the columns that ONNX Runtime takes at a time at most.
_PART_BYTES, _COLUMNS = 1 << 21, 64
#: Float operations, and rows, that are worth waking a thread for: to run a session takes Python's lock twice.
_UNIT_OPERATIONS, _UNIT_ROWS = 1 << 27, 16
#: Units a thread gets at most: one that the system holds up should not hold much.
_UNITS_EACH = 4


@final
class Threads:
    """The threads that ONNX Runtime's products of one stage run on, and the room that they need."""

    def __init__(self, kernels: Kernels, count: int) -> None:
        """`count` of the kernels' threads, the caller's among them."""
        self.count = count
        self.share: Callable[[int, int, Callable[[int], None]], None] = kernels.share
        self._room = untouched_bytes(0)

    def room(self, rows: int, columns: int) -> NDArray[np.float32]:
        """Float32 [rows * columns], contents undefined, for one product at a time."""
        if self._room.size < rows * columns * 4:
            self._room = untouched_bytes(rows * columns * 4)
        return self._room[: rows * columns * 4].view(np.float32)


@final
class OrtLinear:
    """A skeleton graph over weights: as they are mapped, or column ranges of them copied, in sessions of one thread."""

    def __init__(self, graph: bytes, weights: Mapping[str, NDArray[Any]], *, threads: Threads) -> None:
        """`weights` are the graph's initializers by name, matrix first. ONNX Runtime repacks them."""
        matrix = next(iter(weights.values()))
        self.weight_type = matrix.dtype
        self._threads = threads
        self._depth, self._columns = matrix.shape
        self._parts: list[_Part] = []
        ends = column_ends(self._depth, self._columns, matrix.itemsize, threads.count)
        for begin, end in zip([0, *ends], ends, strict=False):
            if len(ends) == 1:
                part = _Part(graph, weights, begin, end)
            else:
                of_part = {name: np.ascontiguousarray(one[..., begin:end]) for name, one in weights.items()}
                part = _Part(with_columns(graph, self._columns, end - begin), of_part, begin, end)
            self._parts.append(part)

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        """Multiply `rows` (uint8 with zero point 128, or float32; contiguous [R, K], R >= 1) into `out` [R, N]."""
        count, parts = rows.shape[0], self._parts
        operations = 2 * count * self._depth * self._columns
        ends = row_ends(count, operations, len(parts), self._threads.count)
        units = [(part, *ends_) for part in parts for ends_ in zip([0, *ends], ends, strict=False)]
        direct = len(parts) == 1 or count == 1
        room = None if direct else self._threads.room(count, self._columns)

        def multiply(index: int) -> None:
            part, begin, end = units[index]
            to = out[begin:end, part.begin : part.end]
            if room is None:
                part.run(rows[begin:end], to)
                return
            width, first = part.end - part.begin, count * part.begin
            found = room[first + begin * width : first + end * width].reshape(end - begin, width)
            part.run(rows[begin:end], found)
            to[...] = found

        if len(units) == 1:
            multiply(0)
        else:
            self._threads.share(len(units), operations, multiply)

    @property
    def recorded_rows(self) -> int:
        """No number of rows: these calls are not our kernels'."""
        return 0

    def forget_buffers(self) -> None:
        """Drop what refers to the caller's buffers: they are about to be replaced."""
        for part in self._parts:
            part.bindings.clear()


def column_ends(depth: int, columns: int, item_bytes: int, threads: int) -> list[int]:
    """Where the parts of a matrix end: about as many as threads, none of them small. Pure."""
    parts = max(1, min(threads, depth * columns * item_bytes // _PART_BYTES, columns // _COLUMNS))
    return [columns * part // parts // _COLUMNS * _COLUMNS for part in range(1, parts)] + [columns]


def row_ends(rows: int, operations: int, parts: int, threads: int) -> list[int]:
    """Where the row ranges end in which each part of a product with so many float operations is multiplied. Pure."""
    most = min(_UNITS_EACH * threads, operations // _UNIT_OPERATIONS) // parts if threads > 1 else 1
    ranges = max(1, min(most, rows // _UNIT_ROWS))
    return [rows * one // ranges for one in range(1, ranges + 1)]


@final
class _Part:
    """Columns `begin` to `end` of a product, in a session without threads."""

    def __init__(self, graph: bytes, weights: Mapping[str, NDArray[Any]], begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        # The graph that was hashed is the graph that runs, but for the number of columns.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        self._values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), self._values)
        self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._input = str(self._session.get_inputs()[0].name)
        self._output = str(self._session.get_outputs()[0].name)
        self.bindings: dict[tuple[int, int, int], Any] = {}

    def run(self, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        """Multiply into `out`, contiguous."""
        key = (rows.ctypes.data, out.ctypes.data, rows.shape[0])
        binding = self.bindings.get(key)
        if binding is None:
            binding = self._session.io_binding()
            binding.bind_input(self._input, "cpu", 0, rows.dtype.type, rows.shape, key[0])
            binding.bind_output(self._output, "cpu", 0, np.float32, out.shape, key[1])
            if rows.shape[0] <= _KEPT_BINDINGS:
                self.bindings[key] = binding
        self._session.run_with_iobinding(binding)
