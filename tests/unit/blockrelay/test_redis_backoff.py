"""Delays between attempts to reach Redis."""

import pytest

from blockrelay.redis.client import backoff_s


def test_it_is_seen_to_be_back_after_a_tenth_more_of_the_time_it_was_away() -> None:
    away, attempts = 0.0, 0
    while (wait := backoff_s(attempts)) < 1.0:
        assert wait == pytest.approx(0.02 + 0.1 * away)
        away, attempts = away + wait, attempts + 1
    assert away == pytest.approx(10, abs=1) and attempts < 50
    assert backoff_s(10**6) == 1.0
