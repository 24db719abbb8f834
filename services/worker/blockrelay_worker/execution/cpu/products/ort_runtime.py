"""ONNX Runtime by its C interface: sessions on one pool of threads, which sleep when they have no work.

The Python interface has neither. There a session keeps threads of its own, a model of 32 layers 1,935 on 16 cores, and
those of the pool that sessions can share wait for work in an endless loop for 20 ms after each product, on the cores
that our kernels need. The C interface is a table of functions that only ever grows at its end: their places are fixed.

Source: onnxruntime/core/session/onnxruntime_c_api.h. The library lies in the package onnxruntime, on every platform.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import onnxruntime
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError

#: The version of the C interface that has everything below (ONNX Runtime 1.12).
_API_VERSION: Final = 12
#: Names of the library on Linux, macOS and Windows.
_LIBRARIES: Final = ("libonnxruntime.so.*", "libonnxruntime.*.dylib", "onnxruntime.dll")
_P, _INT, _SIZE, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p
#: Where a function stands in the table, and what it takes. Each answers a status, null for success, unless said below.
_FUNCTIONS: Final[dict[str, tuple[int, list[Any]]]] = {
    "GetErrorMessage": (2, [_P]),
    "CreateSessionFromArray": (8, [_P, _P, _SIZE, _P, _P]),
    "Run": (9, [_P, _P, _P, _P, _SIZE, _P, _SIZE, _P]),
    "CreateSessionOptions": (10, [_P]),
    "SetSessionLogSeverityLevel": (22, [_P, _INT]),
    "SetSessionGraphOptimizationLevel": (23, [_P, _INT]),
    "SessionGetInputName": (36, [_P, _SIZE, _P, _P]),
    "SessionGetOutputName": (37, [_P, _SIZE, _P, _P]),
    "CreateTensorWithDataAsOrtValue": (49, [_P, _P, _SIZE, _P, _SIZE, _INT, _P]),
    "CreateCpuMemoryInfo": (69, [_INT, _INT, _P]),
    "AllocatorFree": (76, [_P, _P]),
    "GetAllocatorWithDefaultOptions": (78, [_P]),
    "ReleaseStatus": (93, [_P]),
    "ReleaseSession": (95, [_P]),
    "ReleaseValue": (96, [_P]),
    "ReleaseSessionOptions": (100, [_P]),
    "CreateEnvWithGlobalThreadPools": (119, [_INT, _TEXT, _P, _P]),
    "DisablePerSessionThreads": (120, [_P]),
    "CreateThreadingOptions": (121, [_P]),
    "ReleaseThreadingOptions": (122, [_P]),
    "SetGlobalIntraOpNumThreads": (147, [_P, _INT]),
    "SetGlobalInterOpNumThreads": (148, [_P, _INT]),
    "SetGlobalSpinControl": (149, [_P, _INT]),
    "AddExternalInitializers": (210, [_P, _P, _P, _SIZE]),
}
_ANSWERS: Final[dict[str, Any]] = {
    "GetErrorMessage": _TEXT,
    **dict.fromkeys([name for name in _FUNCTIONS if name.startswith("Release")]),
}
#: ONNXTensorElementDataType.
_TYPES: Final = {"float32": 1, "uint8": 2, "int8": 3}
_ERROR_LEVEL, _NO_OPTIMISATION, _ARENA, _DEFAULT_MEMORY = 3, 0, 1, 0

_lock = threading.Lock()
_runtime: "OrtRuntime | None" = None


def shared_runtime(threads: int) -> "OrtRuntime":
    """The runtime of this process. It has as many threads, the caller's among them, as the first caller asked for."""
    global _runtime
    with _lock:
        if _runtime is None:
            _runtime = OrtRuntime(threads)
        return _runtime


@final
class OrtRuntime:
    """ONNX Runtime's environment, with its pool of threads. Use `shared_runtime`."""

    def __init__(self, threads: int) -> None:
        """Raises ExecutionError if the package has no library that can be used."""
        self._functions = _load()
        self._memory, self._allocator, self._environment = _P(), _P(), _P()
        self.call("CreateCpuMemoryInfo", _ARENA, _DEFAULT_MEMORY, ctypes.byref(self._memory))
        self.call("GetAllocatorWithDefaultOptions", ctypes.byref(self._allocator))
        pool = _P()
        self.call("CreateThreadingOptions", ctypes.byref(pool))
        self.call("SetGlobalIntraOpNumThreads", pool, threads)
        self.call("SetGlobalInterOpNumThreads", pool, 1)
        self.call("SetGlobalSpinControl", pool, 0)
        made = ctypes.byref(self._environment)
        self.call("CreateEnvWithGlobalThreadPools", _ERROR_LEVEL, b"blockrelay", pool, made)
        self.call("ReleaseThreadingOptions", pool)

    def function(self, name: str) -> Callable[..., Any]:
        """A function of the table; its status is the caller's to look at (`check`)."""
        return self._functions[name]

    def call(self, name: str, *values: Any) -> None:
        """Call a function of the table. Raises ExecutionError with ONNX Runtime's words."""
        self.check(self._functions[name](*values))

    def check(self, status: int | None) -> None:
        """Raise ExecutionError for a status that is not success, and release it."""
        if status:
            words: bytes = self._functions["GetErrorMessage"](status)
            message = words.decode(errors="replace")
            self._functions["ReleaseStatus"](status)
            raise ExecutionError(message)

    def tensor(self, array: NDArray[Any]) -> "Tensor":
        """`array`, contiguous, as ONNX Runtime's value. It must outlive the value."""
        made = _P()
        self.call(
            "CreateTensorWithDataAsOrtValue", self._memory, array.ctypes.data, array.nbytes,
            (ctypes.c_int64 * array.ndim)(*array.shape), array.ndim, _TYPES[array.dtype.name], ctypes.byref(made),
        )  # fmt: skip
        return Tensor(self, made)

    def session(self, graph: bytes, weights: Mapping[str, NDArray[Any]]) -> "OrtSession":
        """A session of this graph, whose initializers with these names are external. ONNX Runtime repacks the weights.

        The graph runs as it was hashed: nothing of it is optimised.
        """
        options, made = _P(), _P()
        self.call("CreateSessionOptions", ctypes.byref(options))
        try:
            self.call("DisablePerSessionThreads", options)
            self.call("SetSessionGraphOptimizationLevel", options, _NO_OPTIMISATION)
            self.call("SetSessionLogSeverityLevel", options, _ERROR_LEVEL)
            values = [self.tensor(array) for array in weights.values()]
            names = (_TEXT * len(values))(*(name.encode() for name in weights))
            self.call("AddExternalInitializers", options, names, _pointers(values), len(values))
            self.call("CreateSessionFromArray", self._environment, graph, len(graph), options, ctypes.byref(made))
        finally:
            self._functions["ReleaseSessionOptions"](options)
        name_of = (self._name("SessionGetInputName", made), self._name("SessionGetOutputName", made))
        return OrtSession(self, made, *name_of, kept=(*weights.values(), *values))

    def _name(self, question: str, session: ctypes.c_void_p) -> bytes:
        text = _P()
        self.call(question, session, 0, self._allocator, ctypes.byref(text))
        name = ctypes.string_at(text.value or 0)
        self.call("AllocatorFree", self._allocator, text)
        return name


@final
class Tensor:
    """A value of ONNX Runtime over memory of ours, released with this object."""

    def __init__(self, runtime: OrtRuntime, value: ctypes.c_void_p) -> None:
        self.value = value
        weakref.finalize(self, runtime.function("ReleaseValue"), value)


@final
class OrtSession:
    """One graph with one input and one output, on the threads of the runtime."""

    def __init__(
        self, runtime: OrtRuntime, session: ctypes.c_void_p, input_name: bytes, output_name: bytes, *, kept: object
    ) -> None:
        """`kept`: what must live as long as the session."""
        self._runtime, self._session, self._kept = runtime, session, kept
        self._input, self._output = (_TEXT * 1)(input_name), (_TEXT * 1)(output_name)
        weakref.finalize(self, runtime.function("ReleaseSession"), session)

    def bind(self, given: NDArray[Any], out: NDArray[Any]) -> Callable[[], None]:
        """What runs the graph from `given` into `out`, both contiguous, again and again; both must outlive it."""
        run, check = self._runtime.function("Run"), self._runtime.check
        inputs, outputs = self._runtime.tensor(given), self._runtime.tensor(out)
        arguments = self._session, None, self._input, _pointers([inputs]), 1, self._output, 1, _pointers([outputs])

        def call(*_kept: object) -> None:
            check(run(*arguments))

        return partial(call, self, inputs, outputs)


def _pointers(values: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (_P * len(values))(*(one.value for one in values))


def _load() -> dict[str, Callable[..., Any]]:
    """The functions of the table, by name."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    found = [path for pattern in _LIBRARIES for path in sorted(folder.glob(pattern))]
    if not found:
        raise ExecutionError(f"{folder} has no library of ONNX Runtime: install the package onnxruntime again")
    library = ctypes.CDLL(str(found[0]))
    library.OrtGetApiBase.restype = ctypes.POINTER(_P)
    get_api = ctypes.CFUNCTYPE(_P, ctypes.c_uint32)(library.OrtGetApiBase()[0])
    table: int | None = get_api(_API_VERSION)
    if table is None:
        raise ExecutionError(f"{found[0]} is too old: it lacks version {_API_VERSION} of its C interface")
    places = (_P * (1 + max(place for place, _ in _FUNCTIONS.values()))).from_address(table)
    return {
        name: ctypes.CFUNCTYPE(_ANSWERS.get(name, _P), *takes)(places[place])
        for name, (place, takes) in _FUNCTIONS.items()
    }
