"""The kernels' matmul with 4-bit weights in groups has the bits of its definition on every CPU, for any shape."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay_worker.execution.cpu.exact_linears import ExactGroupLinear
from blockrelay_worker.kernels import Kernels, load_kernels, supported_isas

Weights = tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float32]]


@pytest.fixture(scope="module", params=[*supported_isas(), "three threads"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param != "three threads":
        return load_kernels(1, isa=request.param)
    found = load_kernels(3)
    if not found.has_group_matmul:
        pytest.skip("no compiled kernels")
    return found


def make(seed: int, rows: int, groups: int, columns: int, kind: str) -> tuple[NDArray[np.uint8], Weights]:
    """Rows and weights; `kind` is what they are like."""
    rng = np.random.default_rng(seed)
    depth = groups * 32
    u = rng.integers(0, 256, (rows, depth), np.uint8)
    q4 = rng.integers(0, 256, (depth // 2, columns), np.uint8)
    gs = rng.uniform(-1, 1, (groups, columns)).astype(np.float16)
    if kind == "extreme":  # the sums farthest from zero
        u = rng.choice(np.array([0, 255], np.uint8), u.shape)
        q4 = rng.choice(np.array([0x00, 0xFF, 0x0F, 0xF0], np.uint8), q4.shape)
        gs = rng.choice(np.array([1, -1, 6e-8, 65504], np.float16), gs.shape)
    elif kind == "sparse":  # zero sums, zero factors, cancellation
        u = rng.choice(np.array([127, 128, 129], np.uint8), u.shape)
        q4 = rng.choice(np.array([0x88, 0x87, 0x98], np.uint8), q4.shape)
        gs = rng.choice(np.array([0, -0.0, 1, -1], np.float16), gs.shape)
    return u, (q4, gs, rng.standard_normal(columns).astype(np.float32))


KINDS = st.sampled_from(["plain", "extreme", "sparse"])
SEEDS = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=100)
@given(rows=st.integers(1, 40), groups=st.integers(1, 9), columns=st.integers(1, 130), seed=SEEDS, kind=KINDS)
@example(rows=1, groups=4, columns=33, seed=0, kind="extreme")
def test_bits_are_those_of_the_definition(
    kernels: Kernels, rows: int, groups: int, columns: int, seed: int, kind: str
) -> None:
    u, weights = make(seed, rows, groups, columns, kind)
    expected = np.empty((rows, columns), np.float32)
    ExactGroupLinear(*weights)(u, expected)
    guarded = np.full((rows + 1, columns), np.nan, np.float32)
    kernels.group_matmul(*weights)(u, guarded[:rows])
    assert guarded[:rows].tobytes() == expected.tobytes()
    assert np.isnan(guarded[rows]).all(), "wrote behind its rows"


@pytest.mark.parametrize("rows", [1, 6, 7, 64])
def test_a_large_product(kernels: Kernels, rows: int) -> None:
    u, weights = make(rows, rows, 64, 1500, "plain")
    expected, found = np.empty((2, rows, 1500), np.float32)
    ExactGroupLinear(*weights)(u, expected)
    kernels.group_matmul(*weights)(u, found)
    assert found.tobytes() == expected.tobytes()


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, kind=KINDS)
def test_the_oracle_is_the_definition_in_fractions(seed: int, kind: str) -> None:
    u, (q4, gs, scale) = make(seed, 2, 5, 3, kind)
    found = np.empty((2, 3), np.float32)
    ExactGroupLinear(q4, gs, scale)(u, found)
    for row, line in enumerate(found):
        for column, y in enumerate(line):
            acc = np.float32(0)
            for group in range(5):
                ks = range(group * 32, group * 32 + 32)
                nibbles = [int(q4[k // 2, column]) >> 4 * (k % 2) & 15 for k in ks]
                dot = sum((int(u[row, k]) - 128) * (q - 8) for k, q in zip(ks, nibbles, strict=True))
                acc = _rounded(Fraction(float(gs[group, column])) * dot + Fraction(float(acc)))
            assert y == acc * scale[column]


def _rounded(exact: Fraction) -> np.float32:
    """The nearest float32, half to even."""
    near = np.float32(float(exact))  # off by one step at most, after two roundings
    near_values = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(near_values, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


def test_wrong_weights_are_errors_before_anything_is_read(kernels: Kernels) -> None:
    q4, gs, scale = np.zeros((32, 4), np.uint8), np.zeros((2, 4), np.float16), np.ones(4, np.float32)
    with pytest.raises(ExecutionError, match="gs"):
        kernels.group_matmul(q4, gs[:1], scale)
    with pytest.raises(ExecutionError, match="scale"):
        kernels.group_matmul(q4, gs, scale[:3])
    with pytest.raises(ExecutionError, match="groups of 32"):
        kernels.group_matmul(q4[:24], gs, scale)
