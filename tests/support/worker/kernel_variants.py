"""The kernels that this machine can run, and the comparison of their results with those of the NumPy kernels."""

from collections.abc import Callable
from typing import Any

import pytest
from numpy.typing import NDArray

from blockrelay_worker.kernels import Kernels, load_kernels, supported_isas
from tests.support.worker.kernel_cases import same_bits

REFERENCE = load_kernels(1, isa="reference")
#: (instruction set, threads) -> native kernels; empty where none were built.
NATIVE = {(name, threads): load_kernels(threads, isa=name) for name in supported_isas() for threads in (1, 3)}
every_variant = pytest.mark.parametrize("kernels", NATIVE.values(), ids=[f"{n}-{t}" for n, t in NATIVE])


def assert_same(case: object, call: Callable[[Kernels], tuple[NDArray[Any], ...]]) -> None:
    """Asserts that `call` gives with all native kernels the bits that it gives with the NumPy kernels."""
    expected = call(REFERENCE)
    for (name, threads), native in NATIVE.items():
        for position, (left, right) in enumerate(zip(expected, call(native), strict=True)):
            assert same_bits(left, right), f"result {position} of {name} with {threads} threads differs for {case}"
