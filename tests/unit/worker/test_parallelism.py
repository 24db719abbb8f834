"""Into how many groups the decode rows of a route are split."""

import pytest

from blockrelay_worker.parallelism import Seat, groups_of


@pytest.mark.parametrize(
    ("seats", "groups"),
    [
        ([Seat("h", 2, 1), Seat("h", 2, 1)], 2),
        ([Seat("h", 2, 2), Seat("h", 2, 2)], 1),
        ([Seat("h", 2, 1)] * 3, 2),
        ([Seat("h", 8, 2)] * 3, 3),
        ([Seat("h", 4, 2), Seat("h", 4, 2), Seat("h", 4, 2)], 2),
        ([Seat("a", 2, 2), Seat("b", 2, 2)], 2),
        ([Seat("a", 1, 4)], 1),
    ],
)
def test_as_many_groups_as_stages_that_compute_at_once(seats: list[Seat], groups: int) -> None:
    assert groups_of(seats) == groups
