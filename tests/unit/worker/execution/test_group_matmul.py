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
from blockrelay_worker.kernels.interface import Linear
from tests.support.worker.kernel_cases import same_bits

Weights = tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]
Rows = tuple[NDArray[np.uint8], NDArray[np.float32]]


@pytest.fixture(scope="module", params=[*supported_isas(), "three threads"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param != "three threads":
        return load_kernels(1, isa=request.param)
    found = load_kernels(3)
    if not found.has_matmul:
        pytest.skip("no compiled kernels")
    return found


def make(seed: int, rows: int, groups: int, columns: int, kind: str) -> tuple[Rows, Weights]:
    """Rows with their scales, and weights; `kind` is what they are like."""
    rng = np.random.default_rng(seed)
    depth = groups * 32
    u = rng.integers(0, 256, (rows, depth), np.uint8)
    q4 = rng.integers(0, 256, (depth // 2, columns), np.uint8)
    gs, gm = rng.uniform(-1, 1, (2, groups, columns)).astype(np.float16)
    scale = rng.uniform(0, 0.1, (rows, groups)).astype(np.float32)
    if kind == "extreme":  # the sums farthest from zero
        u = rng.choice(np.array([0, 255], np.uint8), u.shape)
        q4 = rng.choice(np.array([0x00, 0xFF, 0x0F, 0xF0], np.uint8), q4.shape)
        gs, gm = rng.choice(np.array([1, -1, 6e-8, 65504], np.float16), (2, *gs.shape))
        scale = rng.choice(np.array([1e-12, 1, 3e38, 2e-38], np.float32), scale.shape)
    elif kind == "sparse":  # zero sums, zero factors, cancellation
        u = rng.choice(np.array([127, 128, 129], np.uint8), u.shape)
        q4 = rng.choice(np.array([0x88, 0x87, 0x98], np.uint8), q4.shape)
        gs = rng.choice(np.array([0, -0.0, 1, -1], np.float16), gs.shape)
        gm = np.float16(-8) * gs
        scale = rng.choice(np.array([0.5, 1], np.float32), scale.shape)
    elif kind == "odd":  # rows and weights that are not finite spoil only themselves
        scale[rng.integers(rows)] = np.nan
        gs[rng.integers(groups), rng.integers(columns)] = np.inf
        gm[rng.integers(groups), rng.integers(columns)] = np.nan
    return (u, scale), (q4, gs, gm)


def product(linear: Linear, rows: Rows, out: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiplies the rows into `out` and returns it."""
    u, scale = rows
    linear(u, out, scale)
    return out


KINDS = st.sampled_from(["plain", "extreme", "sparse", "odd"])
SEEDS = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=100)
@given(rows=st.integers(1, 40), groups=st.integers(1, 9), columns=st.integers(1, 130), seed=SEEDS, kind=KINDS)
@example(rows=1, groups=4, columns=33, seed=0, kind="extreme")
def test_bits_are_those_of_the_definition(
    kernels: Kernels, rows: int, groups: int, columns: int, seed: int, kind: str
) -> None:
    given, weights = make(seed, rows, groups, columns, kind)
    expected = product(ExactGroupLinear(*weights), given, np.empty((rows, columns), np.float32))
    guarded = np.full((rows + 1, columns), 7, np.float32)
    found = product(kernels.group_matmul(*weights), given, guarded[:rows])
    assert same_bits(found, expected)
    assert (guarded[rows] == 7).all(), "wrote behind its rows"


@pytest.mark.parametrize("rows", [1, 6, 7, 64])
def test_a_large_product(kernels: Kernels, rows: int) -> None:
    given, weights = make(rows, rows, 64, 1500, "plain")
    expected = product(ExactGroupLinear(*weights), given, np.empty((rows, 1500), np.float32))
    found = product(kernels.group_matmul(*weights), given, np.empty((rows, 1500), np.float32))
    assert found.tobytes() == expected.tobytes()


def test_a_row_has_the_bits_that_it_has_alone(kernels: Kernels) -> None:
    (u, scale), weights = make(3, 17, 6, 70, "plain")
    linear = kernels.group_matmul(*weights)
    together = product(linear, (u, scale), np.empty((17, 70), np.float32))
    for row in range(17):
        part = slice(row, row + 1)
        alone = product(linear, (u[part], scale[part]), np.empty((1, 70), np.float32))
        assert alone.tobytes() == together[part].tobytes()


def test_it_multiplies_quantised_rows_by_the_weights(kernels: Kernels) -> None:
    # Given rows whose groups differ in size by powers of ten, and weights as the format defines them
    rng = np.random.default_rng(5)
    x = rng.standard_normal((9, 256)).astype(np.float32) * np.repeat(10.0 ** rng.integers(-3, 3, (9, 8)), 32, axis=1)
    _, (q4, gs, gm) = make(6, 1, 8, 40, "plain")
    nibbles = np.stack([q4 & 15, q4 >> 4], axis=1).reshape(256, 40)
    weights = nibbles * np.repeat(gs.astype(np.float64), 32, axis=0) + np.repeat(gm.astype(np.float64), 32, axis=0)
    # Then the product of the quantised rows is that of the rows, within what half a step of each value makes
    x = x.astype(np.float32)
    u, scale = kernels.quantise(x, group=32)
    found = product(kernels.group_matmul(q4, gs, gm), (u, scale), np.empty((9, 40), np.float32))
    steps = np.repeat(scale.astype(np.float64), 32, axis=1)
    assert (np.abs(found - x @ weights) <= 0.5001 * steps @ np.abs(weights) + 1e-4 * np.abs(x) @ np.abs(weights)).all()


@settings(deadline=None, max_examples=40)
@given(seed=SEEDS, kind=st.sampled_from(["plain", "sparse"]))
def test_the_oracle_is_the_definition_in_fractions(seed: int, kind: str) -> None:
    (u, scale), (q4, gs, gm) = make(seed, 2, 5, 3, kind)
    found = product(ExactGroupLinear(q4, gs, gm), (u, scale), np.empty((2, 3), np.float32))
    for row, line in enumerate(found):
        for column, y in enumerate(line):
            acc = np.float32(0)
            for group in range(5):
                ks = range(group * 32, group * 32 + 32)
                nibbles = [int(q4[k // 2, column]) >> 4 * (k % 2) & 15 for k in ks]
                values = [int(u[row, k]) - 128 for k in ks]
                dot = sum(x * q for x, q in zip(values, nibbles, strict=True))
                total = np.float32(sum(values)) * scale[row, group]
                acc = _fma(total, np.float32(gm[group, column]), acc)
                acc = _fma(np.float32(dot), np.float32(gs[group, column]) * scale[row, group], acc)
            assert y == acc


def _fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return _rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def _rounded(exact: Fraction) -> np.float32:
    """The nearest float32, half to even."""
    near = np.float32(float(exact))  # off by one step at most, after two roundings
    near_values = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(near_values, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


def test_wrong_weights_are_errors_before_anything_is_read(kernels: Kernels) -> None:
    q4, gs = np.zeros((32, 4), np.uint8), np.zeros((2, 4), np.float16)
    with pytest.raises(ExecutionError, match="gs"):
        kernels.group_matmul(q4, gs[:1], gs)
    with pytest.raises(ExecutionError, match="gm"):
        kernels.group_matmul(q4, gs, gs[:, :3])
    with pytest.raises(ExecutionError, match="groups of 32"):
        kernels.group_matmul(q4[:24], gs, gs)


def test_wrong_scales_are_errors_before_anything_is_read(kernels: Kernels) -> None:
    linear = kernels.group_matmul(np.zeros((32, 4), np.uint8), *np.zeros((2, 2, 4), np.float16))
    u, out = np.zeros((3, 64), np.uint8), np.empty((3, 4), np.float32)
    with pytest.raises(ExecutionError, match="scale: multiply_groups takes one"):
        linear(u, out)
    with pytest.raises(ExecutionError, match=r"scale: expected .*\[3, 2\]"):
        linear(u, out, np.ones(3, np.float32))
