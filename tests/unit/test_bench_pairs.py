"""The arithmetic of `bench.pairs`; the measurement itself is no test."""

import pytest

from bench.pairs import ratio_of


def test_the_ratio_is_that_of_pairs_and_not_of_means() -> None:
    found = ratio_of([10.0, 100.0, 10.0, 100.0], [10.0, 100.0, 10.0, 100.0])
    assert (found.mean, found.half) == (1.0, 0.0), "a machine that is ten times slower now and then changes nothing"


def test_the_interval_is_that_of_a_mean() -> None:
    found = ratio_of([1.1, 0.9] * 10, [1.0] * 20)
    assert found.mean == pytest.approx(1.0) and found.half == pytest.approx(1.96 * 0.1026 / 20**0.5, rel=1e-3)
    assert found.lower == pytest.approx(found.mean - found.half)


def test_pairs_are_complete() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio_of([1.0, 2.0], [1.0])
