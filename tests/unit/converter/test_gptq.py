"""Weights that make up for each other's rounding: as the textbook computes it, and what it is for."""

from typing import Protocol

import numpy as np
import pytest

from blockrelay_converter.quantisation.columns import quantise_columns
from blockrelay_converter.quantisation.gptq import blocks_of, feedback_of, round_in_order
from blockrelay_converter.quantisation.groups import group_values, quantise_groups
from blockrelay_converter.weight_source import F32, F64
from tests.support.models.checkpoints import stored


class Rounding(Protocol):
    def __call__(self, weights: F32, inputs: F64 | None = None) -> F32: ...


def correlated(rng: np.random.Generator, depth: int, rows: int) -> F64:
    """Inputs [depth, rows] that a quarter as many causes move together."""
    causes = rng.standard_normal((depth // 4, rows))
    return rng.standard_normal((depth, depth // 4)) @ causes + 0.1 * rng.standard_normal((depth, rows))


def eight_bits(weights: F32, inputs: F64 | None = None) -> F32:
    q, scale = quantise_columns(weights, () if inputs is None else feedback_of(inputs))
    return q.T * scale[:, None]


def four_bits(weights: F32, inputs: F64 | None = None) -> F32:
    return group_values(*quantise_groups(weights, () if inputs is None else feedback_of(inputs)))


def error(held: F32, weights: F32, inputs: F64) -> float:
    return float(np.linalg.norm((held - weights) @ inputs) / np.linalg.norm(weights @ inputs))


@pytest.mark.parametrize(
    ("depth", "sizes"), [(20, [20]), (512, [512]), (544, [256, 288]), (576, [288, 288]), (1100, [352, 384, 364])]
)
def test_blocks_cover_all_inputs_in_whole_groups(depth: int, sizes: list[int]) -> None:
    blocks = blocks_of(depth)
    assert [block.stop - block.start for block in blocks] == sizes
    assert [place for block in blocks for place in range(block.start, block.stop)] == list(range(depth))


def textbook(weights: F64, inputs: F64, scale: F64) -> F64:
    """Returns the integers [N, K] of GPTQ's algorithm 1 without its blocks: one inverse for each input that is left."""
    products = inputs @ inputs.T
    products += 0.5 * np.trace(products) / len(products) * np.eye(len(products))
    rest, q = weights.copy(), np.empty_like(weights)
    for place in range(weights.shape[1]):
        inverse = np.linalg.inv(products[place:, place:])
        q[:, place] = np.rint(rest[:, place] / scale).clip(-127, 127)
        wrong = rest[:, place] - q[:, place] * scale
        rest[:, place:] -= np.outer(wrong, inverse[0] / inverse[0, 0])
    return q


def test_weights_of_a_block_are_those_of_the_textbook() -> None:
    rng = np.random.default_rng(1)
    weights, inputs = rng.standard_normal((5, 70)).astype(np.float32), correlated(rng, 70, 300)
    q, scale = quantise_columns(weights, feedback_of(inputs))
    expected = textbook(weights.astype(np.float64), inputs, scale.astype(np.float64))
    np.testing.assert_array_equal(q.T, expected)


@pytest.mark.parametrize("rounding", [eight_bits, four_bits])
@pytest.mark.parametrize("depth", [64, 608])
def test_errors_of_inputs_that_come_together_cancel_on_rows_that_were_not_seen(rounding: Rounding, depth: int) -> None:
    rng = np.random.default_rng(depth)
    weights = rng.standard_normal((40, depth)).astype(np.float32)
    seen, unseen = np.split(correlated(rng, depth, 4 * depth), 2, axis=1)
    plain, calibrated = rounding(weights), rounding(weights, seen)
    assert error(calibrated, weights, unseen) < 0.75 * error(plain, weights, unseen)


@pytest.mark.parametrize("rounding", [eight_bits, four_bits])
def test_nothing_is_learned_from_inputs_that_come_together_by_chance(rounding: Rounding) -> None:
    rng = np.random.default_rng(8)
    weights = rng.standard_normal((40, 512)).astype(np.float32)
    seen, unseen = np.split(rng.standard_normal((512, 4096)), 2, axis=1)
    plain, calibrated = rounding(weights), rounding(weights, seen)
    assert error(calibrated, weights, unseen) < 1.05 * error(plain, weights, unseen)


@pytest.mark.parametrize("inputs", [np.zeros((96, 50)), np.eye(96)])
def test_inputs_that_never_come_or_never_together_change_nothing(inputs: F64) -> None:
    weights = np.random.default_rng(2).standard_normal((30, 96)).astype(np.float32)
    np.testing.assert_array_equal(eight_bits(weights, inputs), eight_bits(weights))
    np.testing.assert_array_equal(four_bits(weights, inputs), four_bits(weights))


@pytest.mark.parametrize("bfloat16", [False, True])
def test_weights_on_a_grid_of_4_bits_stay_there(bfloat16: bool) -> None:
    rng = np.random.default_rng(3)
    steps = np.repeat(rng.uniform(0.01, 0.02, (20, 4)).astype(np.float16).astype(np.float32), 32, axis=1)
    weights: F32 = steps * rng.integers(-8, 8, (20, 128)).astype(np.float32)
    if bfloat16:  # moves weights by up to a twentieth of a step
        bits = stored(weights, "bfloat16").astype(np.uint32) << np.uint32(16)
        weights = bits.view(np.float32)
    held = four_bits(weights, correlated(rng, 128, 400))
    np.testing.assert_array_equal(held, four_bits(weights))
    np.testing.assert_allclose(held, weights, rtol=0, atol=0.002)


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_tiny_and_huge_weights_are_held_as_well_as_others(factor: float) -> None:
    rng = np.random.default_rng(5)
    weights, inputs = rng.standard_normal((9, 96)).astype(np.float32), correlated(rng, 96, 300)
    small = weights * np.float32(factor)
    assert error(eight_bits(small, inputs), small, inputs) < 1.01 * error(eight_bits(weights, inputs), weights, inputs)


@pytest.mark.parametrize("factor", [1e-180, 1e180])
def test_feedback_does_not_depend_on_how_large_inputs_are(factor: float) -> None:
    inputs = correlated(np.random.default_rng(6), 64, 200)
    for ours, expected in zip(feedback_of(inputs * factor), feedback_of(inputs), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)


def test_rows_of_zeros_are_rounded_to_zeros() -> None:
    weights, feedback = np.zeros((3, 40), np.float32), feedback_of(correlated(np.random.default_rng(4), 40, 90))
    assert not quantise_columns(weights, feedback)[0].any()
    zeros = np.zeros(3, np.float32)
    assert not round_in_order(weights, feedback, lambda _: (zeros, zeros), lowest=0, highest=15).any()
