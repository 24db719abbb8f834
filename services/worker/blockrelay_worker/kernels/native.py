"""Kernels in C++ (services/worker/native), one shared object per instruction set, called with ctypes.

This module checks arguments and passes pointers on. ctypes releases the interpreter lock during a call.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, final

from blockrelay.errors import ExecutionError, UsageError
from blockrelay_worker.kernels import arguments
from blockrelay_worker.kernels.interface import F16, F32, I8, I32, I64, U8, Matmul, Pages, Program
from blockrelay_worker.kernels.libraries import library, supported_isas
from blockrelay_worker.kernels.matmuls import ChannelMatmul, GroupMatmul
from blockrelay_worker.kernels.recorded import KernelCall, RecordedProgram, Runner, Value, word, words_of
from blockrelay_worker.kernels.specification import PAGE

_P = ctypes.c_void_p
_D = ctypes.c_double
_INT = ctypes.c_int32
_LONG = ctypes.c_int64

# Result and argument types of each function, as in kernels.h.
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "open": (_P, [_INT]),
    "close": (None, [_P]),
    "norm": (_INT, [_P, _P, _P, _D, _P, _LONG, _LONG]),
    "norm_quantise": (_INT, [_P, _P, _P, _D, _P, _P, _LONG, _LONG]),
    "quantise": (_INT, [_P, _P, _P, _P, _LONG, _LONG]),
    "add_scaled": (_INT, [_P, _P, _P, _P, _LONG, _LONG]),
    "scale_rows": (_INT, [_P, _P, _P, _LONG, _LONG]),
    "swiglu": (_INT, [_P, _P, _P, _LONG, _LONG]),
    "swiglu_quantise": (_INT, [_P, _P, _P, _P, _P, _LONG, _LONG]),
    "rotary_append": (_INT, [_P] * 6 + [_D] + [_P] * 8 + [_INT, _LONG, _LONG, _LONG, _INT, _INT, _INT]),
    "attention": (_INT, [_P] * 7 + [_INT, _LONG, _LONG, _LONG, _LONG, _INT, _INT, _INT]),
    "pack_groups": (None, [_P, _P, _P, _LONG, _LONG, _P]),
    "multiply_groups": (_INT, [_P] * 5 + [_LONG] * 3),
}
#: Functions that only variants with VNNI instructions have: avx512vnni and avx512amx.
_PRODUCT_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "pack_weights": (None, [_P, _P, _LONG, _LONG, _P, _P]),
    "multiply": (_INT, [_P] * 6 + [_LONG] * 3),
}
_PROGRAM_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "invoker": (_P, [ctypes.c_char_p]),
    "run": (_LONG, [_P, _P, _LONG]),
}
_INDEX_OUT_OF_RANGE: Final = 1


@cache
def _functions(path: Path) -> dict[str, Callable[..., Any]]:
    """Returns the functions of one shared object, by name without the prefix `blockrelay_`."""
    library = ctypes.CDLL(str(path))
    functions: dict[str, Callable[..., Any]] = {}
    for name, (result, argtypes) in (_signatures(library) | _PROGRAM_SIGNATURES).items():
        function = library[f"blockrelay_{name}"]
        function.argtypes = argtypes
        function.restype = result
        functions[name] = function
    return functions


def _signatures(library: ctypes.CDLL) -> dict[str, tuple[Any, list[Any]]]:
    return _SIGNATURES | (_PRODUCT_SIGNATURES if hasattr(library, "blockrelay_multiply") else {})


@cache
def _runner(path: Path) -> Runner:
    """Returns the functions of one shared object that run programs."""
    functions = _functions(path)
    invokers = {name: int(functions["invoker"](name.encode()) or 0) for name in functions}
    formats = {
        name: words_of(argtypes[1:])
        for name, (_, argtypes) in (_SIGNATURES | _PRODUCT_SIGNATURES).items()
        if invokers.get(name)
    }
    return Runner(functions["run"], invokers, formats)


def _require(status: int) -> None:
    if status:
        raise ExecutionError(
            "a kernel refused its indices" if status == _INDEX_OUT_OF_RANGE else "no memory for a kernel"
        )


@final
class NativeKernels:
    """`Kernels` in C++, with the same bits as `ReferenceKernels` for any number of threads."""

    def __init__(self, isa: str, threads: int) -> None:
        """Starts `threads` - 1 threads, which sleep between calls; the caller is the other one.

        Raises UsageError for a variant that this machine cannot run, ExecutionError if the threads cannot be started.
        """
        path = library(isa).path if isa in supported_isas() else None
        if path is None:
            raise UsageError(f"kernel variant {isa!r} cannot run here; usable: {', '.join(supported_isas()) or 'none'}")
        if threads < 1:
            raise UsageError(f"kernels need at least one thread, got {threads}")
        self._isa = isa
        self._functions = functions = _functions(path)
        self._pool: int = functions["open"](threads) or 0
        if not self._pool:
            raise ExecutionError(f"the operating system refused {threads - 1} kernel threads")
        # Not at interpreter exit: another thread may be inside a kernel, and the process ends anyway.
        weakref.finalize(self, functions["close"], self._pool).atexit = False
        self._runner = _runner(path)
        self._recording: list[KernelCall] | None = None

    @property
    def isa(self) -> str:
        return self._isa

    def norm_quantise(
        self, x: F32, weight: F32, eps: float, *, u: U8 | None = None, scale: F32 | None = None
    ) -> tuple[U8, F32]:
        rows, hidden = arguments.matrix_shape("x", x)
        arguments.check("weight", weight, arguments.FLOAT32, (hidden,))
        u, scale = arguments.quantised_out(u, scale, rows, hidden)
        self.call("norm_quantise", x, weight, eps, u, scale, rows, hidden)
        return u, scale

    def norm(self, x: F32, weight: F32, eps: float, *, out: F32 | None = None) -> F32:
        rows, hidden = arguments.matrix_shape("x", x)
        arguments.check("weight", weight, arguments.FLOAT32, (hidden,))
        out = arguments.float32_out("out", out, (rows, hidden))
        self.call("norm", x, weight, eps, out, rows, hidden)
        return out

    def quantise(self, x: F32, *, u: U8 | None = None, scale: F32 | None = None) -> tuple[U8, F32]:
        rows, columns = arguments.matrix_shape("x", x)
        u, scale = arguments.quantised_out(u, scale, rows, columns)
        self.call("quantise", x, u, scale, rows, columns)
        return u, scale

    def rotary_append(
        self,
        qkv: F32,
        row_scale: F32 | None,
        bias: F32 | None,
        norm_q: F32 | None,
        norm_k: F32 | None,
        eps: float,
        cos: F32,
        sin: F32,
        positions: I32,
        page: I32,
        slot: I32,
        k_pages: Pages,
        v_pages: Pages,
        *,
        out: F32 | None = None,
    ) -> F32:
        shape = arguments.rotary_shape(
            qkv, row_scale, bias, norm_q, norm_k, cos, sin, positions, page, slot, k_pages, v_pages
        )
        out = arguments.float32_out("out", out, (shape.rows, shape.query_heads, shape.head_dim))

        def refused(status: int) -> None:
            if status == _INDEX_OUT_OF_RANGE:
                arguments.check_range("positions", positions, cos.shape[0])
                arguments.check_range("page", page, shape.pages)
                arguments.check_range("slot", slot, PAGE)
            _require(status)

        self.call(
            "rotary_append",
            *(qkv, row_scale, bias, norm_q, norm_k),
            eps,
            *(cos, sin, positions, page, slot, k_pages, v_pages, out),
            k_pages.dtype == arguments.FLOAT16,
            shape.rows,
            cos.shape[0],
            shape.pages,
            shape.query_heads,
            shape.kv_heads,
            shape.head_dim,
            refused=refused,
        )
        return out

    def attention(
        self, q: F32, k_pages: Pages, v_pages: Pages, page_table: I32, segments: I64, *, out: F32 | None = None
    ) -> F32:
        shape = arguments.attention_shape(q, k_pages, v_pages, page_table, segments)
        out = arguments.float32_out("out", out, (shape.rows, shape.query_heads * shape.head_dim))

        def refused(status: int) -> None:
            if status == _INDEX_OUT_OF_RANGE:
                arguments.check_segments(segments, page_table, shape)
            _require(status)

        self.call(
            "attention",
            *(q, k_pages, v_pages, page_table, segments, out),
            k_pages.dtype == arguments.FLOAT16,
            page_table.shape[0],
            page_table.shape[1],
            shape.rows,
            shape.pages,
            shape.query_heads,
            shape.kv_heads,
            shape.head_dim,
            refused=refused,
        )
        return out

    def add_scaled(self, x: F32, y: F32, row_scale: F32 | None) -> None:
        rows, columns = arguments.matrix_shape("x", x)
        arguments.check("y", y, arguments.FLOAT32, (rows, columns))
        if row_scale is not None:
            arguments.check("row_scale", row_scale, arguments.FLOAT32, (rows,))
        self.call("add_scaled", x, y, row_scale, rows, columns)

    def scale_rows(self, x: F32, row_scale: F32) -> None:
        rows, columns = arguments.matrix_shape("x", x)
        arguments.check("row_scale", row_scale, arguments.FLOAT32, (rows,))
        self.call("scale_rows", x, row_scale, rows, columns)

    def swiglu_quantise(
        self, gate_up: F32, row_scale: F32, *, u: U8 | None = None, scale: F32 | None = None
    ) -> tuple[U8, F32]:
        rows, columns = arguments.gate_up_shape(gate_up)
        arguments.check("row_scale", row_scale, arguments.FLOAT32, (rows,))
        u, scale = arguments.quantised_out(u, scale, rows, columns)
        self.call("swiglu_quantise", gate_up, row_scale, u, scale, rows, columns)
        return u, scale

    def swiglu(self, gate_up: F32, *, out: F32 | None = None) -> F32:
        rows, columns = arguments.gate_up_shape(gate_up)
        out = arguments.float32_out("out", out, (rows, columns))
        self.call("swiglu", gate_up, out, rows, columns)
        return out

    @property
    def has_matmul(self) -> bool:
        return "multiply" in self._functions

    def matmul(self, q: I8, scale: F32) -> Matmul:
        return ChannelMatmul(self, q, scale)

    @property
    def has_group_matmul(self) -> bool:
        return True

    def group_matmul(self, q4: U8, gs: F16, scale: F32) -> Matmul:
        return GroupMatmul(self, q4, gs, scale)

    @property
    def records(self) -> bool:
        return True

    def record(self, parts: Sequence[Callable[[], None]]) -> Program:
        assert self._recording is None, "a part records"
        recorded: list[list[KernelCall]] = []
        try:
            for part in parts:
                self._recording = []
                part()
                recorded.append(self._recording)
        finally:
            self._recording = None
        return RecordedProgram(self._runner, self._pool, recorded)

    def call(self, name: str, *values: Value, refused: Callable[[int], None] = _require) -> None:
        """Calls a function of the shared object with this object's threads; while recording, only records the call.

        `refused` is called with a status that is not 0, and must raise; by default it raises ExecutionError.
        """
        if self._recording is not None:
            self._recording.append(KernelCall(name, values, refused))
        elif status := self._functions[name](self._pool, *map(word, values)):
            refused(status)
