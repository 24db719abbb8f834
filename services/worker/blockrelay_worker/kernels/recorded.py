"""Programs: the kernel calls of a batch, in parts (one per block), made directly or recorded and replayed."""

import ctypes
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, final

import numpy as np

from blockrelay.errors import ExecutionError
from blockrelay_worker.kernels.interface import IndexCheck, Value

#: Makes the kernel calls of one part.
Part: TypeAlias = Callable[[], None]
_INDEX_OUT_OF_RANGE: Final = 1  # statuses; see kernels.h
_RANK_GONE: Final = 3


@final
class Direct:
    """A program that calls its parts in Python."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def run(self, seconds: list[float]) -> None:
        """Calls the parts, and appends the wall time of each to `seconds` (see `interface.Program.run`)."""
        for part in self._parts:
            started = time.perf_counter()
            part()
            seconds.append(time.perf_counter() - started)


class KernelCall(NamedTuple):
    """One recorded call of a native function."""

    name: str
    values: tuple[Value, ...]
    """Arguments behind the thread pool, which is the first of every function."""
    check_indices: IndexCheck


@dataclass(frozen=True, slots=True)
class Runner:
    """The functions of a shared object that run programs."""

    #: `run(pool, steps, count)` makes the calls of a program.
    run: Callable[[int, int, int], int]
    #: Address of the invoker of each function, by name.
    invokers: dict[str, int]
    #: Format of the argument words of each function, for `struct`.
    formats: dict[str, struct.Struct]


#: Number of 8-byte words of a step, and index of the one with its end time (see Step in program.h); factor of the index
#: of a failed call in the result of `run`, to which its status is added.
_STEP_WORDS: Final = 3
_ENDED: Final = 2
_STATUS: Final = 256


@final
class RecordedProgram:
    """A program that makes all its native calls in one call of the shared object.

    Arguments were checked when the calls were recorded.
    """

    def __init__(self, runner: Runner, pool: int, parts: Sequence[Sequence[KernelCall]]) -> None:
        """Prepares the calls of each part; no part may be empty. It keeps the arrays that the calls use alive.

        `pool`: address of the thread pool, as the shared object's `open` returned it.
        """
        self._calls = [call for part in parts for call in part]
        self._ends = np.cumsum([len(part) for part in parts]) - 1
        packed = [runner.formats[call.name].pack(*map(word, call.values)) for call in self._calls]
        self._words = np.frombuffer(b"".join(packed), np.uint64)
        begins = np.cumsum([0, *map(len, packed)])[:-1].astype(np.uint64)
        self._steps = np.zeros((len(packed), _STEP_WORDS), np.uint64)
        self._steps[:, 0] = [runner.invokers[call.name] for call in self._calls]
        self._steps[:, 1] = begins + np.uint64(self._words.ctypes.data)
        self._ended = self._steps.view(np.int64)[:, _ENDED]
        self._arguments = (pool, self._steps.ctypes.data, len(packed))
        self._run = runner.run

    def run(self, seconds: list[float]) -> None:
        """Makes the calls, and appends the wall time of each finished part to `seconds`.

        Raises ExecutionError if a call fails; the calls after it are not made. One thread at a time calls it.
        """
        before = time.perf_counter_ns()  # the same clock as steady_clock in program.h
        failed, status = divmod(self._run(*self._arguments), _STATUS)
        done = int(np.searchsorted(self._ends, failed)) if status else len(self._ends)
        for ended in self._ended[self._ends[:done]].tolist():
            seconds.append((ended - before) * 1e-9)
            before = ended
        if status:
            refuse(status, self._calls[failed].check_indices)


def refuse(status: int, check_indices: IndexCheck) -> NoReturn:
    """Raises ExecutionError for a native call's `status` that is not 0, naming the index where `check_indices` does."""
    if status == _INDEX_OUT_OF_RANGE:
        check_indices()
        raise ExecutionError("a kernel refused its indices")
    if status == _RANK_GONE:
        raise ExecutionError("another process of this group of ranks is gone")
    raise ExecutionError("no memory for a kernel")


def word(value: Value) -> int | float:
    """Returns the number that is passed for an argument: an array's address, a number as it is, 0 for None."""
    if value is None:
        return 0
    return value.ctypes.data if isinstance(value, np.ndarray) else value


def words_of(argtypes: Sequence[Any]) -> struct.Struct:
    """Returns the format of arguments with these ctypes: 8-byte addresses, doubles and signed integers."""
    kinds: dict[Any, str] = {ctypes.c_void_p: "Q", ctypes.c_double: "d", ctypes.c_int32: "q", ctypes.c_int64: "q"}
    return struct.Struct("=" + "".join(kinds[kind] for kind in argtypes))
