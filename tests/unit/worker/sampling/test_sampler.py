"""The sampler is a function; these are its values, its edges and its distribution."""

import math
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.sampling import exact_math
from blockrelay_worker.sampling.sampler import Draw, log_probabilities, sample, uniform


def _row(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def _shares(logits: NDArray[np.float32], params: SamplingParams, draws: int = 4000) -> dict[int, float]:
    counts = Counter(sample(Draw(logits, params, 11, position)).token for position in range(draws))
    return {token: count / draws for token, count in counts.items()}


def test_greedy_takes_the_best_and_of_equals_the_first() -> None:
    assert sample(Draw(_row(0, 3, 1, 3), SamplingParams(temperature=0), 1, 5)).token == 1


def test_a_draw_is_a_function_of_seed_and_position() -> None:
    logits = np.linspace(0, 2, 50, dtype=np.float32)
    params = SamplingParams(temperature=1.5)
    tokens = [sample(Draw(logits, params, 7, position)).token for position in range(20)]
    assert tokens == [sample(Draw(logits, params, 7, position)).token for position in range(20)]
    assert tokens != [sample(Draw(logits, params, 8, position)).token for position in range(20)]
    assert tokens == [sample(Draw(logits, params, 7 - 2**64, position)).token for position in range(20)]


def _philox4x64(counter: int, key: int) -> int:
    """First word of Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    mask = 2**64 - 1
    c0, c1, c2, c3 = counter & mask, counter >> 64, 0, 0
    k0, k1 = key, 0
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (second >> 64) ^ c1 ^ k0, second & mask, (first >> 64) ^ c3 ^ k1, first & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return c0


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (0, 1), (2**64 - 1, 10**6), (-1, 10**6)])
def test_the_random_numbers_are_those_of_the_published_generator(seed: int, position: int) -> None:
    assert _philox4x64(0, 0) == 0x16554D9ECA36314C  # the authors' test vector
    # NumPy steps the counter before it draws.
    assert uniform(seed, position) == (_philox4x64(position + 1, seed % 2**64) >> 11) * 2.0**-53


def test_the_random_numbers_are_even() -> None:
    numbers = np.array([uniform(3, position) for position in range(4000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.histogram(numbers, bins=10, range=(0, 1))[0].min() > 320


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits = _row(*(math.log(p) for p in (0.5, 0.25, 0.15, 0.1)))
    shares = _shares(logits, SamplingParams())
    for token, probability in enumerate((0.5, 0.25, 0.15, 0.1)):
        assert shares[token] == pytest.approx(probability, abs=0.03)


def test_temperature_flattens_and_sharpens() -> None:
    logits = _row(math.log(0.8), math.log(0.2))
    assert _shares(logits, SamplingParams(temperature=2.0))[0] == pytest.approx(2 / 3, abs=0.03)
    assert _shares(logits, SamplingParams(temperature=0.5))[0] == pytest.approx(16 / 17, abs=0.03)
    assert _shares(logits, SamplingParams(temperature=1e-300), draws=50) == {0: 1.0}


def test_top_k_keeps_the_best_and_of_equals_the_first() -> None:
    assert set(_shares(_row(1, 2, 2, 2, 0), SamplingParams(top_k=2), draws=200)) == {1, 2}
    assert set(_shares(_row(1, 2, 2, 2, 0), SamplingParams(top_k=1), draws=50)) == {1}
    assert set(_shares(_row(1, 1), SamplingParams(top_k=9), draws=50)) == {0, 1}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = _row(*(math.log(p) for p in (0.1, 0.5, 0.15, 0.25)))
    assert set(_shares(logits, SamplingParams(top_p=0.7), draws=300)) == {1, 3}
    assert set(_shares(logits, SamplingParams(top_p=0.4), draws=50)) == {1}
    assert set(_shares(logits, SamplingParams(top_p=0.76), draws=600)) == {1, 2, 3}
    assert set(_shares(_row(0, 0, 0, 0), SamplingParams(top_p=0.5), draws=200)) == {0, 1}


def test_top_p_over_many_equal_tokens_keeps_the_lowest_ids() -> None:
    logits = np.zeros(5000, np.float32)
    assert max(_shares(logits, SamplingParams(top_p=0.5), draws=500)) < 2500


def test_min_p_compares_with_the_best_token() -> None:
    logits = _row(math.log(0.5), math.log(0.06), math.log(0.04), math.log(0.4))
    assert set(_shares(logits, SamplingParams(min_p=0.1), draws=600)) == {0, 1, 3}
    assert set(_shares(logits, SamplingParams(min_p=1.0), draws=50)) == {0}


def test_log_probabilities_are_of_the_models_own_distribution() -> None:
    logits = _row(*(math.log(p) for p in (0.1, 0.5, 0.15, 0.25)))
    sampled = sample(Draw(logits, SamplingParams(temperature=0, top_k=1, logprobs=3), 0, 0))
    assert sampled.token == 1
    assert sampled.logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert [token for token, _ in sampled.top] == [1, 3, 2]
    assert [logprob for _, logprob in sampled.top] == pytest.approx([math.log(p) for p in (0.5, 0.25, 0.15)], abs=1e-6)
    assert sample(Draw(logits, SamplingParams(logprobs=0), 0, 0)).top == ()
    assert sample(Draw(logits, SamplingParams(), 0, 0)).logprob is None


def test_extreme_logits_are_no_problem() -> None:
    logits = _row(3e38, -3e38, 0)
    assert _shares(logits, SamplingParams(), draws=20) == {0: 1.0}
    assert log_probabilities(logits).tolist()[0] == 0.0


def test_exp_and_log_are_right_to_the_last_bits() -> None:
    points = -np.random.default_rng(0).random(20_000) * 650
    np.testing.assert_allclose(exact_math.exp(points), np.exp(points), rtol=1e-15)
    assert exact_math.exp(np.array([0.0, -1e6])).tolist() == [1.0, 0.0]
    for x in (1.0, 2.0, 0.7071, 0.70711, 1e-300, 1e300, 1.5, 128256.0):
        assert exact_math.log(x) == pytest.approx(math.log(x), rel=1e-15, abs=1e-15)
