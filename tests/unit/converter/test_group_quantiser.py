"""4-bit weights in groups: what the numbers in a folder say about the weights they came from."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from blockrelay_converter.quantisation.groups import group_values, quantise_groups

F32 = NDArray[np.float32]
LARGEST = 65504.0


def _random(seed: int, count: int, depth: int) -> F32:
    return np.random.default_rng(seed).standard_normal((count, depth)).astype(np.float32)


def _halves(values: NDArray[np.floating[Any]]) -> F32:
    """`values` as float16 holds them."""
    return values.astype(np.float16).astype(np.float32)


def _kept(weights: F32) -> NDArray[np.bool_]:
    """[N, groups]: the groups of which every weight comes back to the bit."""
    same = group_values(*quantise_groups(weights)) == weights
    return same.reshape(weights.shape[0], -1, 32).all(axis=-1)


ROWS = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda shape: arrays(
        np.float32, (shape[0], shape[1] * 32), elements=st.floats(-LARGEST, LARGEST, width=32), fill=st.just(0.0)
    )
)


def _far_apart() -> F32:
    weights = np.zeros((3, 64), np.float32)
    weights[:, 0] = 1
    weights[:, 32] = 4e-39, 1e-12, -2e-8
    weights[2, 1:3] = LARGEST, -LARGEST
    return weights


@given(weights=ROWS)
@example(weights=_far_apart())
def test_every_tensor_is_what_kernels_may_rely_on(weights: F32) -> None:
    q4, gs, gm = quantise_groups(weights)
    count, depth = weights.shape
    assert (q4.shape, q4.dtype) == ((depth // 2, count), np.uint8)
    for factors in (gs, gm):
        assert (factors.shape, factors.dtype) == ((depth // 32, count), np.float16)
        assert np.isfinite(factors).all() and not np.signbit(factors[factors == 0]).any()
    zero = gs == 0
    assert not q4.reshape(-1, 16, count).transpose(0, 2, 1)[zero].any()
    empty = (weights == 0).reshape(count, -1, 32).all(axis=2).T
    assert zero[empty].all() and not gm[empty].any()


@given(weights=ROWS)
@example(weights=_far_apart())
def test_no_group_is_worse_than_by_its_ends(weights: F32) -> None:
    groups = weights.reshape(weights.shape[0], -1, 32).astype(np.float64)
    low = groups.min(axis=2, keepdims=True)
    step = ((groups.max(axis=2, keepdims=True) - low) / 15).astype(np.float16).astype(np.float64)
    start = low.astype(np.float16).astype(np.float64)
    plain = np.rint((groups - start) / np.where(step == 0, np.inf, step)).clip(0, 15) * step + start
    held = group_values(*quantise_groups(weights)).reshape(groups.shape)
    ours, theirs = (np.square(each - groups).sum(axis=2) for each in (held, plain))
    assert (ours <= theirs * (1 + 1e-4) + 32 * (1e-6 * np.abs(groups).max(axis=2)) ** 2).all()


def _q4_0(weights: F32) -> F32:
    """The weights as llama.cpp's Q4_0 holds them: (nibble - 8) * d, the largest at nibble 0."""
    groups = weights.reshape(-1, 32)
    largest = groups[np.arange(len(groups)), np.abs(groups).argmax(axis=1)][:, None]
    d = largest / np.float32(-8)
    q = np.minimum(np.floor(groups / d + np.float32(8.5)), 15)
    return ((q - 8) * _halves(d)).astype(np.float32).reshape(weights.shape)


def _q4_1(weights: F32) -> F32:
    """The weights as llama.cpp's Q4_1 holds them: nibble * d + m."""
    groups = weights.reshape(-1, 32)
    low = groups.min(axis=1, keepdims=True)
    d = (groups.max(axis=1, keepdims=True) - low) / np.float32(15)
    q = np.minimum(np.floor((groups - low) / d + np.float32(0.5)), 15)
    return (q * _halves(d) + _halves(low)).astype(np.float32).reshape(weights.shape)


@pytest.mark.parametrize("deviation", [0.004, 0.02, 1])
@pytest.mark.parametrize("grid", [_q4_0, _q4_1])
def test_a_4_bit_sources_weights_come_back_to_the_bit(grid: Callable[[F32], F32], deviation: float) -> None:
    weights = grid(_random(2, 256, 512) * np.float32(deviation))
    assert _kept(weights).all()


@pytest.mark.parametrize("most", range(1, 16))
def test_a_grid_is_found_whatever_nibbles_are_used(most: int) -> None:
    # Given groups with the nibbles `first` to `first + most`, and a minimum far from 0 or none of the group's
    rng = np.random.default_rng(most)
    first = rng.integers(0, 16 - most, (400, 1))
    q = rng.integers(0, most + 1, (400, 32))
    q[:, 0], q[:, 1] = 0, most
    d = _halves(rng.uniform(0.001, 0.01, (400, 1))) * rng.choice(np.array([-1, 1], np.float32), (400, 1))
    minimum = _halves(rng.uniform(-0.2, 0.2, (400, 1)))
    minimum[::2] = -8 * d[::2]
    assert _kept(((q + first) * d + minimum).astype(np.float32)).all()


def test_a_grid_that_bfloat16_has_rounded_is_found_nearly() -> None:
    exact = _q4_0(_random(5, 64, 512))
    stored = ((exact.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)
    held = group_values(*quantise_groups(stored))
    assert np.linalg.norm(held - exact) < 0.002 * np.linalg.norm(exact)


@pytest.mark.parametrize("value", [0, 1, -0.3333, LARGEST, 2.0**-24])
def test_equal_weights_are_what_float16_holds(value: float) -> None:
    q4, gs, gm = quantise_groups(np.full((1, 32), value, np.float32))
    assert (gs[0, 0], gm[0, 0], q4.any()) == (0, np.float16(value), False)


@pytest.mark.parametrize("power", [-4, 0, 8])
def test_a_power_of_two_changes_the_factors_and_nothing_else(power: int) -> None:
    weights = _random(1, 5, 96)
    q4, gs, gm = quantise_groups(weights)
    shifted = quantise_groups(np.ldexp(weights, power))
    assert shifted[0].tobytes() == q4.tobytes()
    np.testing.assert_array_equal(shifted[1], np.ldexp(gs, power))
    np.testing.assert_array_equal(shifted[2], np.ldexp(gm, power))


def test_columns_do_not_see_each_other_and_chunks_do_not_show() -> None:
    weights = _random(3, 40, 128 * 32)
    weights[7], weights[20:22] = _q4_1(weights[7:8]), _q4_0(weights[20:22])
    whole = quantise_groups(weights)
    for part in (slice(0, 1), slice(1, 30), slice(30, 40)):
        for found, expected in zip(quantise_groups(weights[part]), whole, strict=True):
            np.testing.assert_array_equal(found, expected[..., part])


def test_the_error_of_normal_weights_is_a_fourteenth() -> None:
    weights = _random(4, 256, 512)
    error = np.linalg.norm(group_values(*quantise_groups(weights)) - weights) / np.linalg.norm(weights)
    assert 0.07 < error < 0.0735


def test_low_nibbles_are_even_inputs() -> None:
    weights = np.full((1, 32), -8, np.float32)
    weights[0, 2:5] = -7, 7, 6
    q4, gs, gm = quantise_groups(weights)
    assert q4[:, 0].tolist() == [0x00, 0xF1, 0x0E, *[0x00] * 13]
    assert (gs[0, 0], gm[0, 0]) == (1, -8)
