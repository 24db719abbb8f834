"""4-bit weights in groups: what the numbers in a folder say about the weights they came from."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from blockrelay_converter.quantisation.groups import group_values, quantise_groups

F32 = NDArray[np.float32]


def _random(seed: int, count: int, depth: int) -> F32:
    return np.random.default_rng(seed).standard_normal((count, depth)).astype(np.float32)


def _squares(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N, groups]: the sum of squares of each group."""
    return np.square(values).reshape(values.shape[0], -1, 32).sum(axis=-1)


ROWS = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda shape: arrays(
        np.float32, (shape[0], shape[1] * 32), elements=st.floats(-(2.0**99), 2.0**99, width=32), fill=st.just(0.0)
    )
)


def _far_apart() -> F32:
    weights = np.zeros((2, 64), np.float32)
    weights[:, 0] = 1
    weights[:, 32] = 4e-39, 1e-12
    return weights


@given(weights=ROWS)
@example(weights=_far_apart())
def test_every_tensor_is_what_kernels_may_rely_on(weights: F32) -> None:
    q4, gs, scale = quantise_groups(weights)
    count, depth = weights.shape
    assert (q4.shape, q4.dtype) == ((depth // 2, count), np.uint8)
    assert (gs.shape, gs.dtype) == ((depth // 32, count), np.float16)
    assert (scale.shape, scale.dtype) == ((count,), np.float32)
    assert (np.abs(gs) <= 1).all() and np.isfinite(scale).all() and (scale > 0).all()
    zero = np.abs(weights).max(axis=1) < 2.0**-100
    assert (np.abs(gs).max(axis=0) == np.where(zero, 0, 1)).all()


@given(weights=ROWS)
def test_no_group_is_worse_than_by_plain_rounding(weights: F32) -> None:
    # Given the factor that clips nothing: the larger end at -8, the other one at 7 or nearer
    held = group_values(*quantise_groups(weights)).astype(np.float64)
    exact = weights.astype(np.float64)
    groups = exact.reshape(weights.shape[0], -1, 32)
    ends = np.sort(np.abs(np.stack([groups.max(axis=2), groups.min(axis=2)])), axis=0)
    step = np.maximum(ends[1] / 8, ends[0] / 7).repeat(32, axis=1)
    step[step == 0] = 1
    plain = np.rint(exact / step) * step
    # a factor is rounded to 11 bits of it, or to 2**-25 of the column's largest where that is more
    slack = 1e-3 * _squares(exact) + 32 * 64 * (2.0**-24 * np.abs(exact).max(axis=1, keepdims=True)) ** 2
    assert (_squares(held - exact) <= _squares(plain - exact) + slack + 2.0**-190).all()


@pytest.mark.parametrize("power", [-90, 0, 100])
def test_a_power_of_two_changes_the_column_scales_and_nothing_else(power: int) -> None:
    weights = _random(1, 5, 96)
    q4, gs, scale = quantise_groups(weights)
    shifted = quantise_groups(np.ldexp(weights, power))
    assert shifted[0].tobytes() == q4.tobytes() and shifted[1].tobytes() == gs.tobytes()
    np.testing.assert_array_equal(shifted[2], np.ldexp(scale, power))


def test_what_fits_4_bits_is_kept_to_the_bit_of_its_factor() -> None:
    # Given columns made of q * gs * scale, every group reaching both ends
    rng = np.random.default_rng(2)
    q = rng.integers(-8, 8, (64, 3, 32))
    q[..., 0], q[..., 1] = -8, 7
    gs = rng.choice(np.array([1, -1, 0.5, -0.25]), (64, 3, 1))
    gs[:, 0] = 1
    weights = (q * gs * 0.75).reshape(64, 96).astype(np.float32)
    np.testing.assert_array_equal(group_values(*quantise_groups(weights)), weights)


def test_columns_do_not_see_each_other_and_chunks_do_not_show() -> None:
    weights = _random(3, 40, 128)
    whole = quantise_groups(weights)
    for part in (slice(0, 1), slice(1, 30), slice(30, 40)):
        for found, expected in zip(quantise_groups(weights[part]), whole, strict=True):
            np.testing.assert_array_equal(found, expected[..., part])


def test_the_error_of_normal_weights_is_a_twelfth() -> None:
    weights = _random(4, 256, 512)
    error = np.linalg.norm(group_values(*quantise_groups(weights)) - weights) / np.linalg.norm(weights)
    assert 0.07 < error < 0.083


def test_low_nibbles_are_even_inputs() -> None:
    weights = np.zeros((1, 32), np.float32)
    weights[0, 2:4] = -8, 7
    q4, gs, scale = quantise_groups(weights)
    assert q4[:, 0].tolist() == [0x88, 0xF0, *[0x88] * 14]
    assert (gs[0, 0], scale[0]) == (1, 1)
