"""What steps and hops take beside blocks and bytes, out of whole systems' times."""

import pytest

from blockrelay.planning.profile import Hop
from blockrelay_launcher.profile import fitted, fitted_hop

CARRIED = Hop(seconds=0.0001, seconds_per_byte=1e-9)


def test_a_line_goes_through_what_was_measured_and_never_below_zero() -> None:
    found = fitted([(1, 0.003), (4, 0.006), (16, 0.018)])
    assert (found.seconds, found.seconds_per_row) == pytest.approx((0.002, 0.001))
    falling = fitted([(1, 0.003), (16, 0.001)])
    assert falling.seconds_per_row == 0
    assert falling.seconds == pytest.approx(0.002)
    assert fitted([(1, -0.003), (16, -0.001)]).seconds == 0


def test_two_stages_take_a_hop_there_with_the_rows_and_one_back() -> None:
    # Given steps that take 2 ms more in two stages, and 0.1 ms more for each row of 1,000 bytes
    found = fitted_hop([(r, 0.002 + r * 0.0001) for r in (1, 4, 16)], CARRIED, row_bytes=1000)
    assert (found.seconds, found.seconds_per_byte) == pytest.approx((0.001, 1e-7))


def test_of_one_request_alone_its_bytes_take_what_they_were_measured_to_take() -> None:
    found = fitted_hop([(1, 0.002)], CARRIED, row_bytes=1000)
    assert found.seconds == pytest.approx((0.002 - 1000 * 1e-9) / 2)
    assert found.seconds_per_byte == CARRIED.seconds_per_byte


def test_no_hop_takes_less_than_its_bytes_on_their_way() -> None:
    found = fitted_hop([(1, -0.001), (16, -0.002)], CARRIED, row_bytes=1000)
    assert found == CARRIED
