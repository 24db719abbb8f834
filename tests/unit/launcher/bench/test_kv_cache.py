"""Figures of requests with and without the KV cache, from arrival times."""

from itertools import accumulate

import pytest

from blockrelay_launcher.bench.figures import Round
from blockrelay_launcher.bench.kv_cache import LONG_NEW, growth, step_s

pytestmark = pytest.mark.thorough


def test_growth_is_of_the_steps_to_tokens_41_to_50_over_those_to_11_to_20() -> None:
    # Given an answer of 50 tokens whose step to token n takes 1 s, 2 s from token 11 on and 3 s from token 41 on
    took = [3 if n > 40 else 2 if n > 10 else 1 for n in range(1, LONG_NEW + 1)]
    one = Round(0.0, [list(accumulate(took))])
    assert step_s(one) == pytest.approx((9 + 60 + 30) / 49)
    assert growth(one) == pytest.approx(1.5)
