"""The kernels' integer matmul has the bits of its definition for any shape, number of rows and of threads."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay_worker.execution.cpu.exact_linears import ExactLinear
from blockrelay_worker.kernels import Kernels, load_kernels, supported_isas
from blockrelay_worker.kernels.buffers import untouched_bytes

MULTIPLYING = [name for name in supported_isas() if load_kernels(1, isa=name).has_matmul]

pytestmark = pytest.mark.skipif(not MULTIPLYING, reason="no kernels of this CPU have products")


@pytest.fixture(scope="module", params=[1, 2, 3])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(request.param, isa=MULTIPLYING[0])


@settings(deadline=None, max_examples=150)
@given(
    rows=st.integers(1, 70),
    depth=st.integers(1, 300),
    columns=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
    extreme=st.booleans(),
)
def test_bits_are_those_of_the_definition(
    kernels: Kernels, rows: int, depth: int, columns: int, seed: int, extreme: bool
) -> None:
    rng = np.random.default_rng(seed)
    if extreme:  # the sums farthest from zero
        u = rng.choice(np.array([0, 255], np.uint8), (rows, depth))
        q = rng.choice(np.array([-128, 127], np.int8), (depth, columns))
    else:
        u = rng.integers(0, 256, (rows, depth), np.uint8)
        q = rng.integers(-128, 128, (depth, columns), np.int8)
    scale = rng.standard_normal(columns).astype(np.float32)
    expected = np.empty((rows, columns), np.float32)
    ExactLinear(q, scale)(u, expected)
    guarded = np.full((rows + 1, columns), np.nan, np.float32)
    kernels.matmul(q, scale)(u, guarded[:rows])
    assert guarded[:rows].tobytes() == expected.tobytes()
    assert np.isnan(guarded[rows]).all(), "wrote behind its rows"


@cache
def large() -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    rng = np.random.default_rng(1)
    return rng.integers(-128, 128, (2048, 3072), np.int8), rng.standard_normal(3072).astype(np.float32)


@cache
def large_product(rows: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """What is multiplied by `large`, and what comes out by definition."""
    q, scale = large()
    u = np.random.default_rng(rows).integers(0, 256, (rows, 2048), np.uint8)
    expected = np.empty((rows, 3072), np.float32)
    ExactLinear(q, scale)(u, expected)
    return u, expected


@pytest.mark.parametrize("rows", [1, 4, 5, 14, 15, 29, 512])
@pytest.mark.parametrize("begin", [0, 4])  # bytes behind a cache line's beginning: large results go past the caches
def test_a_large_product_on_several_threads(kernels: Kernels, rows: int, begin: int) -> None:
    q, scale = large()
    u, expected = large_product(rows)
    found = untouched_bytes(begin + expected.nbytes)[begin:].view(np.float32).reshape(rows, 3072)
    kernels.matmul(q, scale)(u, found)
    assert found.tobytes() == expected.tobytes()


def test_wrong_buffers_are_errors_before_anything_is_read(kernels: Kernels) -> None:
    q, scale = np.zeros((8, 4), np.int8), np.ones(4, np.float32)
    product = kernels.matmul(q, scale)
    out = np.empty((2, 4), np.float32)
    with pytest.raises(ExecutionError, match="rows"):
        product(np.zeros((2, 9), np.uint8), out)
    with pytest.raises(ExecutionError, match="out"):
        product(np.zeros((3, 8), np.uint8), out)
    with pytest.raises(ExecutionError, match="scale: multiply takes none"):
        product(np.zeros((2, 8), np.uint8), out, np.ones(2, np.float32))
    with pytest.raises(ExecutionError, match="scale"):
        kernels.matmul(q, np.ones(5, np.float32))
    with pytest.raises(ExecutionError, match="fit into int32"):
        kernels.matmul(np.zeros((70000, 1), np.int8), np.ones(1, np.float32))
