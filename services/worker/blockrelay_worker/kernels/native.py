"""Kernels in C++ (services/worker/native), one shared object per instruction set, called with ctypes.

This module passes pointers on. ctypes releases the interpreter lock during a call.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError, UsageError
from blockrelay_worker.kernels.arguments import F16, F32, F64, I8, I64, U8
from blockrelay_worker.kernels.interface import IndexCheck, Kernels, Linear, Program, Value, no_indices
from blockrelay_worker.kernels.libraries import library, supported_isas
from blockrelay_worker.kernels.matmuls import channel_matmul, group_matmul
from blockrelay_worker.kernels.recorded import KernelCall, RecordedProgram, Runner, refuse, word, words_of
from blockrelay_worker.kernels.sampled_rows import check_sampled

_P = ctypes.c_void_p
_D = ctypes.c_double
_INT = ctypes.c_int32
_LONG = ctypes.c_int64

#: The shared objects whose use of tiles is settled, each with the id of the process.
_settled: set[tuple[Path, int]] = set()
#: More rows than any batch has: no tiles.
NO_TILES: Final = 1 << 40
#: The matrix on which tiles are measured, the numbers of rows, and how often: 4 MB of weights, as one layer has.
_TILE_SHAPE: Final = (2048, 2048)
_TILE_ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
_TILE_ROUNDS: Final = 5


class _Recording(threading.local):
    """The calls that a thread records, while it does: those of other threads are made."""

    calls: list[KernelCall] | None = None


#: One for all kernels: those that record a program may call layers that others of the same variant have made.
_recording: Final = _Recording()

# Result and argument types of each function, as in kernels.h.
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "open": (_P, [_INT]),
    "norm": (_INT, [_P, _P, _P, _D, _P, _LONG, _LONG]),
    "norm_quantise": (_INT, [_P, _P, _P, _D, _P, _P, _LONG, _LONG, _LONG]),
    "quantise": (_INT, [_P, _P, _P, _P] + [_LONG] * 4),
    "add_scaled": (_INT, [_P, _P, _P, _P, _LONG, _LONG]),
    "scale_rows": (_INT, [_P, _P, _P, _LONG, _LONG]),
    "swiglu": (_INT, [_P, _P, _P, _P, _LONG, _LONG]),
    "swiglu_quantise": (_INT, [_P, _P, _P, _P, _P, _LONG, _LONG, _LONG, _LONG]),
    "rotary_append": (_INT, [_P] * 6 + [_D] + [_P] * 8 + [_INT, _LONG, _LONG, _LONG, _INT, _INT, _INT]),
    "attention": (_INT, [_P] * 7 + [_INT, _LONG, _LONG, _LONG, _LONG, _INT, _INT, _INT]),
    "pack_groups": (None, [_P, _P, _P, _P, _LONG, _LONG, _P]),
    "multiply_groups": (_INT, [_P] * 5 + [_LONG] * 3),
    "pack_weights": (None, [_P, _P, _LONG, _LONG, _P, _P]),
    "multiply": (_INT, [_P] * 6 + [_LONG] * 3),
    "tiles_from": (None, [_P, _LONG]),
    "gather": (_INT, [_P, _P, _LONG, _LONG, _P, _P, _P, _LONG, _LONG]),
    "gather_quantise": (_INT, [_P, _P, _LONG, _LONG, _P, _P, _P, _P] + [_LONG] * 4),
    "gather_add_scaled": (_INT, [_P, _P, _LONG, _LONG, _P, _P, _P, _P, _LONG, _LONG]),
    "set_event": (_INT, [_P, _P, _LONG]),
    "wait_for_event": (_INT, [_P, _P, _P, _LONG]),
    "sample": (_INT, [_P, _P, _LONG, _P, _P, _LONG]),
    "read_all": (_INT, [_P, _P, _LONG, _P]),
    "multiply_adds": (_INT, [_P, _LONG, _INT, _P]),
    "invoker": (_P, [ctypes.c_char_p]),
    "run": (_LONG, [_P, _P, _LONG]),
}


@cache
def _functions(path: Path) -> dict[str, Callable[..., Any]]:
    """Returns the functions of one shared object, by name without the prefix `blockrelay_`."""
    library = ctypes.CDLL(str(path))
    functions: dict[str, Callable[..., Any]] = {}
    for name, (result, argtypes) in _SIGNATURES.items():
        function = library[f"blockrelay_{name}"]
        function.argtypes = argtypes
        function.restype = result
        functions[name] = function
    return functions


@cache
def _pool(path: Path, threads: int, process: int) -> int:
    """Returns the pool with this number of threads of a shared object: a process has one, for all kernels and for good.

    `process` is the id of this process: a forked one starts threads of its own. The pool has `threads` - 1 threads,
    which sleep between calls; the caller is the other one. Raises ExecutionError if they cannot be started.
    """
    pool: int = _functions(path)["open"](threads) or 0
    if not pool:
        raise ExecutionError(f"the operating system refused {threads - 1} kernel threads")
    return pool


@cache
def _runner(path: Path) -> Runner:
    """Returns the functions of one shared object that run programs."""
    functions = _functions(path)
    invokers = {name: int(functions["invoker"](name.encode()) or 0) for name in functions}
    formats = {name: words_of(_SIGNATURES[name][1][1:]) for name, invoker in invokers.items() if invoker}
    return Runner(functions["run"], invokers, formats)


def settle_tiles(kernels: Kernels) -> int:
    """Has the variant `amx` use tiles from the number of rows on from which they are faster here, and returns it.

    It measures them beside VNNI, which shares their weights, on one matrix: about 0.1 s. NO_TILES: they never are.
    """
    chance = np.random.default_rng(1)
    q: I8 = chance.integers(-127, 128, _TILE_SHAPE, np.int8)
    multiply = channel_matmul(kernels, q, np.ones(_TILE_SHAPE[1], np.float32))

    def seconds(rows: int, tiles_from: int) -> float:
        u: U8 = chance.integers(0, 256, (rows, _TILE_SHAPE[0]), np.uint8)
        out = np.empty((rows, _TILE_SHAPE[1]), np.float32)
        kernels.call("tiles_from", tiles_from)
        times: list[float] = []
        for _ in range(_TILE_ROUNDS):
            began = time.perf_counter()
            multiply(u, out)
            times.append(time.perf_counter() - began)
        return min(times)

    chosen = NO_TILES
    for rows in reversed(_TILE_ROWS):
        if seconds(rows, 1) > seconds(rows, NO_TILES):
            break
        chosen = rows
    kernels.call("tiles_from", chosen)
    return chosen


@final
class NativeKernels(Kernels):
    """`Kernels` in C++, with the same bits as `ReferenceKernels` for any number of threads."""

    has_matmul = True
    has_sampling = True
    records = True

    def __init__(self, isa: str, threads: int) -> None:
        """Uses the process's pool of `threads` threads, and starts them if they are the first kernels to do so.

        Raises UsageError for a variant that this machine cannot run and for fewer than one thread, ExecutionError if
        the threads cannot be started.
        """
        path = library(isa).path if isa in supported_isas() else None
        if path is None:
            raise UsageError(f"kernel variant {isa!r} cannot run here; usable: {', '.join(supported_isas()) or 'none'}")
        if threads < 1:
            raise UsageError(f"kernels need at least one thread, got {threads}")
        self.isa, self.threads = isa, threads
        self._functions = _functions(path)
        self._pool = _pool(path, threads, os.getpid())
        self._runner = _runner(path)
        if isa == "amx" and (key := (path, os.getpid())) not in _settled:
            _settled.add(key)
            settle_tiles(self)

    def matmul(self, q: I8, scale: F32) -> Linear:
        """Makes the w8a8 matmul with weights q [K,N] and column scales [N]. Needs `has_matmul`.

        Raises ExecutionError for wrong arrays, and for K above 65,536.
        """
        return channel_matmul(self, q, scale)

    def group_matmul(self, q4: U8, gs: F16, gm: F16) -> Linear:
        """Makes the w4a8 matmul with nibbles q4 [K/2,N], and factors gs and minima gm [K/32,N] of groups.

        Raises ExecutionError for wrong arrays, and for K above 131,072.
        """
        return group_matmul(self, q4, gs, gm)

    def sample(self, rows: NDArray[np.void], ids: I64, logprobs: F64) -> None:
        """Draws the token of each of `rows` [R] and writes it there; `ids` and `logprobs` [R, W] get the most likely.

        Raises ExecutionError for wrong arrays and for an index out of range.
        """
        check_sampled(rows, ids, logprobs)
        self.call("sample", rows, len(rows), ids, logprobs, ids.shape[1])

    def record(self, parts: Sequence[Callable[[], None]]) -> Program:
        """Calls each part once and records its kernel calls, which compute nothing now (see `Kernels.record`).

        Raises AssertionError if a part records too.
        """
        assert _recording.calls is None, "a part records"
        recorded: list[list[KernelCall]] = []
        try:
            for part in parts:
                _recording.calls = calls = []
                part()
                recorded.append(calls)
        finally:
            _recording.calls = None
        return RecordedProgram(self._runner, self._pool, recorded)

    def call(self, name: str, *values: Value, check_indices: IndexCheck = no_indices) -> None:
        """Calls a function of the shared object with this object's threads; a thread that records only notes the call.

        Raises ExecutionError for a status that is not 0.
        """
        if (recorded := _recording.calls) is not None:
            recorded.append(KernelCall(name, values, check_indices))
        elif status := self._functions[name](self._pool, *map(word, values)):
            refuse(status, check_indices)
