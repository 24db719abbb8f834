"""The number of groups into which the decode rows of a route are split."""

import pytest

from blockrelay_worker.scheduling.micro_batches import WorkerCores, decode_share, groups_of


@pytest.mark.parametrize(
    ("seats", "groups"),
    [
        ([WorkerCores("h", 2, 1), WorkerCores("h", 2, 1)], 2),
        ([WorkerCores("h", 2, 2), WorkerCores("h", 2, 2)], 1),
        ([WorkerCores("h", 2, 1)] * 3, 2),
        ([WorkerCores("h", 8, 2)] * 3, 3),
        ([WorkerCores("h", 4, 2), WorkerCores("h", 4, 2), WorkerCores("h", 4, 2)], 2),
        ([WorkerCores("a", 2, 2), WorkerCores("b", 2, 2)], 2),
        ([WorkerCores("a", 1, 4)], 1),
    ],
)
def test_as_many_groups_as_stages_that_compute_at_once(seats: list[WorkerCores], groups: int) -> None:
    assert groups_of(seats) == groups


@pytest.mark.parametrize(
    ("flights", "groups", "share"),
    [
        ([None] * 16, 2, 8),
        ([None] * 8 + [7] * 8, 2, 8),
        ([None] * 3 + [6] * 5 + [7] * 8, 2, 0),
        ([None] * 3 + [6] * 13, 1, 0),
        ([None] * 16, 1, 16),
        ([None], 3, 1),
        ([], 2, 1),
    ],
)
def test_as_many_equal_batches_circulate_as_there_are_groups(
    flights: list[int | None], groups: int, share: int
) -> None:
    assert decode_share(flights, groups) == share


def test_uneven_batches_become_even_ones() -> None:
    """Played: requests that came one by one end up in two groups of eight, whatever order batches come back in."""
    under_way: list[list[int]] = [[0], [1, 2, 3]]
    here = list(range(4, 16))
    for _ in range(20):
        flights = [None for _ in here] + [i for i, batch in enumerate(under_way) for _ in batch]
        share = decode_share(flights, 2)
        if here and share:
            under_way.append(here[:share])
            here = here[share:]
        else:
            here += under_way.pop(0)
    assert len(here) + sum(map(len, under_way)) == 16
    assert {len(batch) for batch in under_way} == {8}
