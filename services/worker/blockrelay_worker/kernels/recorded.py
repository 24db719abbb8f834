"""Programs: what blocks do to a batch, in parts, to be run once or again and again."""

import ctypes
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

#: Makes calls of kernels and products.
Part: TypeAlias = Callable[[], None]
#: An argument of a native function: an array stands for its address.
Value: TypeAlias = NDArray[Any] | int | float | None


@final
class Direct:
    """Parts that are called as they are."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def run(self, seconds: list[float]) -> None:
        """As `interface.Program.run`."""
        for part in self._parts:
            started = time.perf_counter()
            part()
            seconds.append(time.perf_counter() - started)


class Call(NamedTuple):
    """One call of a native function; `values` come after the pool. `refused` raises what a status means."""

    name: str
    values: tuple[Value, ...]
    refused: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Runner:
    """What of a shared object runs programs: `run(pool, steps, count)`, and by name how to call a function."""

    run: Callable[[int, int, int], int]
    invokers: dict[str, int]
    #: Format of the argument words of each function, for `struct`.
    formats: dict[str, struct.Struct]


#: Words of a step: how to call it, where its arguments are, when it ended (program.h).
_STEP_WORDS: Final = 3
_ENDED: Final = 2
_STATUS: Final = 256


@final
class Recorded:
    """Native calls whose arguments were checked when they were recorded, made by one call into the shared object."""

    def __init__(self, runner: Runner, pool: int, parts: Sequence[Sequence[Call]]) -> None:
        """`parts`: the calls of each; none is empty. Keeps the arrays that the calls name."""
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
        """As `interface.Program.run`."""
        before = time.perf_counter_ns()  # the steady clock, as program.h's
        failed, status = divmod(self._run(*self._arguments), _STATUS)
        done = int(np.searchsorted(self._ends, failed)) if status else len(self._ends)
        for ended in self._ended[self._ends[:done]].tolist():
            seconds.append((ended - before) * 1e-9)
            before = ended
        if status:
            self._calls[failed].refused(status)


def word(value: Value) -> int | float:
    """The number that stands for an argument in a call; 0 for one that is left out."""
    if value is None:
        return 0
    return value.ctypes.data if isinstance(value, np.ndarray) else value


def words_of(argtypes: Sequence[Any]) -> struct.Struct:
    """How arguments of these ctypes become words: addresses, doubles and integers, eight bytes each."""
    kinds: dict[Any, str] = {ctypes.c_void_p: "Q", ctypes.c_double: "d", ctypes.c_int32: "q", ctypes.c_int64: "q"}
    return struct.Struct("=" + "".join(kinds[kind] for kind in argtypes))
