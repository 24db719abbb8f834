"""The bits of the native kernels do not depend on what other libraries did to the thread that calls them."""

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay_worker.execution.cpu.exact_linears import ExactLinear
from blockrelay_worker.kernels import PAGE, Kernels, load_kernels, supported_isas
from tests.support.worker.kernel_cases import floats, same_bits

_HERE = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64") or not supported_isas(),
    reason="sets the floating-point environment of x86-64 Linux, and needs native kernels",
)
pytestmark = [pytest.mark.thorough, _HERE]

Results = tuple[NDArray[Any], ...]

_UPWARD = 0x4000  # of MXCSR: round towards +infinity
_NO_SUBNORMALS = 0x8040  # flush results to zero, read subnormals as zero


class _Environment(ctypes.Structure):
    """glibc's fenv_t."""

    _fields_ = (("x87", ctypes.c_uint32 * 7), ("mxcsr", ctypes.c_uint32))


@contextmanager
def mxcsr(bits: int) -> Iterator[Callable[[], int]]:
    """Adds `bits` to this thread's MXCSR; gives a function that reads its bits of these. As before afterwards."""
    libm = ctypes.CDLL("libm.so.6")

    def get() -> _Environment:
        environment = _Environment()
        assert libm.fegetenv(ctypes.byref(environment)) == 0
        return environment

    saved, changed = get(), get()
    changed.mxcsr |= bits
    assert libm.fesetenv(ctypes.byref(changed)) == 0
    try:
        yield lambda: get().mxcsr & bits
    finally:
        libm.fesetenv(ctypes.byref(saved))


def _quantise(kernels: Kernels) -> Results:
    return kernels.quantise(_X)


def _quantise_groups(kernels: Kernels) -> Results:
    return kernels.quantise(_X, group=32)


def _norm(kernels: Kernels) -> Results:
    return (kernels.norm(_X, _WEIGHT, 1e-5),)


def _norm_quantise(kernels: Kernels) -> Results:
    return kernels.norm_quantise(_X, _WEIGHT, 1e-5)


def _add_scaled(kernels: Kernels) -> Results:
    x = _X.copy()
    kernels.add_scaled(x, _OTHER, _SCALE)
    return (x,)


def _scale_rows(kernels: Kernels) -> Results:
    x = _X.copy()
    kernels.scale_rows(x, _SCALE)
    return (x,)


def _swiglu(kernels: Kernels) -> Results:
    return (kernels.swiglu(_X),)


def _swiglu_quantise(kernels: Kernels) -> Results:
    return kernels.swiglu_quantise(_X, _SCALE, 128)


def _rotary_append(kernels: Kernels) -> Results:
    k_pages, v_pages = (np.zeros((_ROWS // PAGE + 1, 2, *shape), np.float16) for shape in ((64, PAGE), (PAGE, 64)))
    index = np.arange(_ROWS, dtype=np.int32)
    table = _OTHER[:, :32].copy()
    q = kernels.rotary_append(
        _X[:, : 12 * 64].copy(), _SCALE, _WEIGHT[: 12 * 64].copy(), _WEIGHT[:64].copy(), _WEIGHT[64:128].copy(), 1e-6,
        table, table, index, index // PAGE, index % PAGE, k_pages, v_pages,
    )  # fmt: skip
    return q, k_pages, v_pages


def _attention(kernels: Kernels) -> Results:
    q = _OTHER[:, : 8 * 64].reshape(_ROWS, 8, 64).copy()
    k_pages = _X[:, : 2 * 64].reshape(-1, 2, 64, PAGE).copy()
    table = np.arange(len(k_pages), dtype=np.int32)[None]
    segments = np.array([(0, _ROWS, 0)], np.int64)
    return (kernels.attention(q, k_pages, k_pages.reshape(-1, 2, PAGE, 64), table, segments),)


#: Enough rows for every kernel to wake its other threads.
_ROWS = 512
_RNG = np.random.default_rng(0)
_X, _OTHER = floats(_RNG, _ROWS, 1024), floats(_RNG, _ROWS, 1024, spread=0)
_X[::3, ::5] *= np.float32(1e-38)  # subnormals
_OTHER[::3, ::5] *= np.float32(1e-38)
_WEIGHT, _SCALE = floats(_RNG, 1024, spread=0), floats(_RNG, _ROWS, spread=0)
_CALLS = (
    *(_quantise, _quantise_groups, _norm, _norm_quantise, _add_scaled, _scale_rows, _swiglu, _swiglu_quantise),
    *(_rotary_append, _attention),
)

each_variant = pytest.mark.parametrize("variant", supported_isas())
each_call = pytest.mark.parametrize("call", _CALLS, ids=lambda call: call.__name__.lstrip("_"))
multiplying = [name for name in supported_isas() if load_kernels(1, isa=name).has_matmul]


@cache
def _of_the_reference(call: Callable[[Kernels], Results]) -> Results:
    """Computed once for all variants and modes."""
    return call(load_kernels(1, isa="reference"))


@each_call
@each_variant
@pytest.mark.parametrize("bits", [_UPWARD, _NO_SUBNORMALS], ids=["upward", "no-subnormals"])
def test_a_caller_in_another_mode_gets_the_same_bits_and_keeps_its_mode(
    variant: str, call: Callable[[Kernels], Results], bits: int
) -> None:
    kernels = load_kernels(1, isa=variant)
    expected = _of_the_reference(call)
    with mxcsr(bits) as now:
        got = call(kernels)
        kept = now()
    assert kept == bits
    assert all(same_bits(left, right) for left, right in zip(got, expected, strict=True))


@each_call
@each_variant
def test_threads_that_were_started_in_another_mode_give_the_same_bits(
    variant: str, call: Callable[[Kernels], Results]
) -> None:
    expected = _of_the_reference(call)
    with mxcsr(_UPWARD | _NO_SUBNORMALS):
        kernels = load_kernels(5, isa=variant)  # only here: a process starts the threads of each number once
    for _ in range(5):  # which thread computes what is left to chance
        assert all(same_bits(left, right) for left, right in zip(call(kernels), expected, strict=True))


@pytest.mark.parametrize("variant", multiplying)
def test_products_give_the_same_bits_in_any_mode(variant: str) -> None:
    q = _RNG.integers(-128, 128, (512, 1024), np.int8)
    u = _RNG.integers(0, 256, (_ROWS, 512), np.uint8)
    expected, found = np.empty((2, _ROWS, 1024), np.float32)
    ExactLinear(q, _WEIGHT)(u, expected)
    with mxcsr(_UPWARD | _NO_SUBNORMALS):
        load_kernels(3, isa=variant).matmul(q, _WEIGHT)(u, found)
    assert same_bits(found, expected)
