"""First fit keeps memory compact; best fit keeps a request's pages together. Both give each free page once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.settings.worker import PageAllocation
from blockrelay_worker.execution.free_pages import BestFit, FirstFit, FreePages, free_pages


def _with_gaps(kind: type[FirstFit] | type[BestFit]) -> FreePages:
    """Free pages 2-4, 6, 8-13, 20-24."""
    return kind([*range(2, 5), 6, *range(8, 14), *range(20, 25)])


@pytest.mark.parametrize(
    ("count", "first", "best"),
    [
        (1, [2], [6]),
        (2, [2, 3], [2, 3]),
        (3, [2, 3, 4], [2, 3, 4]),
        (4, [2, 3, 4, 6], [20, 21, 22, 23]),
        (6, [2, 3, 4, 6, 8, 9], [8, 9, 10, 11, 12, 13]),
        (7, [2, 3, 4, 6, 8, 9, 10], [8, 9, 10, 11, 12, 13, 6]),
    ],
)
def test_which_pages_each_policy_gives(count: int, first: list[int], best: list[int]) -> None:
    assert _with_gaps(FirstFit).take(count) == first
    assert _with_gaps(BestFit).take(count) == best


def test_gaps_grow_together_again() -> None:
    pages = _with_gaps(BestFit)
    for page in (7, 5):
        pages.give(page)
    assert pages.take(12) == list(range(2, 14))
    for page in range(2, 14):
        pages.give(page)
    assert pages.take(12) == list(range(2, 14))


@pytest.mark.parametrize("allocation", ["first-fit", "best-fit"])
@given(st.lists(st.integers(-40, 40), max_size=60))
def test_every_page_is_given_once(allocation: PageAllocation, moves: list[int]) -> None:
    """A positive number takes as many pages, a negative one gives a page back, chosen by it."""
    pages, out = free_pages(range(30), allocation), list[int]()
    for move in moves:
        if move >= 0:
            taken = pages.take(min(move, len(pages)))
            assert not set(taken) & set(out)
            out += taken
        elif out:
            pages.give(out.pop(move % len(out)))
        assert sorted([*pages.numbers(), *out]) == list(range(30)) and len(pages) == 30 - len(out)
