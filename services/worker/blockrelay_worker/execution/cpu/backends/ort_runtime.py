"""ONNX Runtime through its C API: sessions on one pool of threads, which sleep when they have no work.

The Python API has neither. With it, a session has threads of its own (1,935 for a model of 32 layers on 16 cores), and
the threads of a shared pool spin for 20 ms after each call, on the cores that our kernels need. The C API is a table
of functions that only grows at its end, so the index of each function is fixed.

Source: onnxruntime/core/session/onnxruntime_c_api.h. The package onnxruntime has the library on every platform.
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

#: Version of the C API that has every function below (ONNX Runtime 1.12).
_API_VERSION: Final = 12
#: Names of the library on Linux, macOS and Windows.
_LIBRARIES: Final = ("libonnxruntime.so.*", "libonnxruntime.*.dylib", "onnxruntime.dll")
_P, _INT, _SIZE, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p
#: Index of each function in the table, and its argument types. It returns a status, null for success, unless `_ANSWERS`
#: has another type.
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
#: Values of ONNXTensorElementDataType, by dtype.
_TYPES: Final = {"float32": 1, "uint8": 2, "int8": 3}
_ERROR_LEVEL, _NO_OPTIMISATION, _ARENA, _DEFAULT_MEMORY = 3, 0, 1, 0

_lock = threading.Lock()
_runtime: "OrtRuntime | None" = None


def shared_runtime(threads: int) -> "OrtRuntime":
    """Returns the runtime of this process, made by the first call.

    It uses the `threads` of the first call, the calling thread among them. Raises ExecutionError if the package
    onnxruntime has no library that can be used.
    """
    global _runtime
    with _lock:
        if _runtime is None:
            _runtime = OrtRuntime(threads)
        return _runtime


@final
class OrtRuntime:
    """ONNX Runtime's environment with its pool of threads. Use `shared_runtime` to get it."""

    def __init__(self, threads: int) -> None:
        """Opens the library. Raises ExecutionError if the package onnxruntime has none that can be used."""
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
        """Returns a function of the table; the caller passes its status to `check`."""
        return self._functions[name]

    def call(self, name: str, *values: Any) -> None:
        """Calls a function of the table. Raises ExecutionError with ONNX Runtime's message."""
        self.check(self._functions[name](*values))

    def check(self, status: int | None) -> None:
        """Raises ExecutionError for a status that is not success, and releases the status."""
        if status:
            words: bytes = self._functions["GetErrorMessage"](status)
            message = words.decode(errors="replace")
            self._functions["ReleaseStatus"](status)
            raise ExecutionError(message)

    def tensor(self, array: NDArray[Any]) -> "OrtTensor":
        """Makes a value of ONNX Runtime over `array`, which must be contiguous and outlive the value.

        Its dtype is float32, uint8 or int8. Raises ExecutionError if ONNX Runtime refuses it.
        """
        made = _P()
        self.call(
            "CreateTensorWithDataAsOrtValue", self._memory, array.ctypes.data, array.nbytes,
            (ctypes.c_int64 * array.ndim)(*array.shape), array.ndim, _TYPES[array.dtype.name], ctypes.byref(made),
        )  # fmt: skip
        return OrtTensor(self, made)

    def session(self, graph: bytes, weights: Mapping[str, NDArray[Any]]) -> "OrtSession":
        """Makes a session of `graph` (a serialised model) with external initializers `weights`, which it repacks.

        The graph has one input and one output. Weights, by the names of its initializers, are contiguous, in float32,
        uint8 or int8; the session keeps them. ONNX Runtime does not optimise the graph, so that it computes exactly
        what the block folder has. Raises ExecutionError if ONNX Runtime refuses it.
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
class OrtTensor:
    """A value of ONNX Runtime over an array's memory; it is released with this object."""

    def __init__(self, runtime: OrtRuntime, value: ctypes.c_void_p) -> None:
        self.value = value
        weakref.finalize(self, runtime.function("ReleaseValue"), value)


@final
class OrtSession:
    """One graph with one input and one output, on the threads of the runtime."""

    def __init__(
        self, runtime: OrtRuntime, session: ctypes.c_void_p, input_name: bytes, output_name: bytes, *, kept: object
    ) -> None:
        """Owns `session`; `kept` are objects that must live as long as it."""
        self._runtime, self._session, self._kept = runtime, session, kept
        self._input, self._output = (_TEXT * 1)(input_name), (_TEXT * 1)(output_name)
        weakref.finalize(self, runtime.function("ReleaseSession"), session)

    def bind(self, rows: NDArray[Any], out: NDArray[Any]) -> Callable[[], None]:
        """Returns a function that runs the graph from `rows` into `out`, as often as it is called.

        Both arrays must be contiguous, in float32, uint8 or int8, and outlive the function. The function raises
        ExecutionError if the run fails; `bind` does if ONNX Runtime refuses an array.
        """
        run, check = self._runtime.function("Run"), self._runtime.check
        inputs, outputs = self._runtime.tensor(rows), self._runtime.tensor(out)
        arguments = self._session, None, self._input, _pointers([inputs]), 1, self._output, 1, _pointers([outputs])

        def call(*_kept: object) -> None:
            check(run(*arguments))

        return partial(call, self, inputs, outputs)


def _pointers(values: Sequence[OrtTensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (_P * len(values))(*(one.value for one in values))


def _load() -> dict[str, Callable[..., Any]]:
    """Returns the functions of ONNX Runtime's C API, by name. Raises ExecutionError if there is no usable library."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    libraries = [path for pattern in _LIBRARIES for path in sorted(folder.glob(pattern))]
    if not libraries:
        raise ExecutionError(f"{folder} has no library of ONNX Runtime: install the package onnxruntime again")
    library = ctypes.CDLL(str(libraries[0]))
    library.OrtGetApiBase.restype = ctypes.POINTER(_P)
    get_api = ctypes.CFUNCTYPE(_P, ctypes.c_uint32)(library.OrtGetApiBase()[0])
    table: int | None = get_api(_API_VERSION)
    if table is None:
        raise ExecutionError(
            f"{libraries[0]} is too old, it lacks version {_API_VERSION} of the C API: install a newer onnxruntime"
        )
    places = (_P * (1 + max(place for place, _ in _FUNCTIONS.values()))).from_address(table)
    return {
        name: ctypes.CFUNCTYPE(_ANSWERS.get(name, _P), *takes)(places[place])
        for name, (place, takes) in _FUNCTIONS.items()
    }
