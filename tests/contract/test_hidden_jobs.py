"""CLAIM finds what a worker can take whatever stands before it, and each call looks at a bounded number of jobs."""

from collections.abc import Callable

import pytest

from tests.support.cell import MODEL, Cell

#: Jobs of which one call passes over some; the pool of the worker `small` is too small for each.
HIDING = 200
SMALL = 4


@pytest.fixture
def cell(cell: Cell) -> Cell:
    cell.agree(dead_after_s=3600)
    cell.worker("big", split="1-4", pages=100_000)
    return cell


def first_runs(cell: Cell) -> None:
    """They wait in the queue of first runs."""
    for i in range(HIDING):
        assert cell.accept(f"req-large-{i}", need=SMALL + 1, limit=10_000).status == "OK"


def commands(cell: Cell, action: Callable[[], object]) -> int:
    """How many commands the action took, those in scripts included."""
    cell.client.config_resetstat()
    action()
    stats: dict[str, dict[str, int]] = cell.client.info("commandstats")  # pyright: ignore
    return sum(int(s["calls"]) for name, s in stats.items() if not name.startswith("cmdstat_config"))


def claimed_within(cell: Cell, calls: int) -> list[str]:
    """What `small` has after so many calls."""
    return [run.request_id for _ in range(calls) for run in cell.claim("small", 8)]


def test_a_first_run_behind_many_that_fit_nowhere_here(cell: Cell) -> None:
    first_runs(cell)
    cell.worker("small", split="1-4", pages=SMALL)
    cell.accept("req-1", need=1, limit=10_000)
    assert claimed_within(cell, 4) == ["req-1"]
    cell.accept("req-2", need=1, limit=10_000)
    assert claimed_within(cell, 8) == ["req-2"], "it goes round"
    assert len(cell.queued()) == HIDING
    assert [run.request_id for run in cell.claim("big", 2)] == ["req-large-0", "req-large-1"], "their turn is theirs"


def test_a_rerun_behind_many_that_fit_nowhere_here(cell: Cell) -> None:
    first_runs(cell)
    runs = [run for _ in range(HIDING // 8) for run in cell.claim("big", 8)]
    cell.worker("small", split="1-4", pages=SMALL)
    small = cell.begin("small", need=1, limit=10_000)
    for run in (*runs, small):
        assert cell.rerun(run, "drain")
    assert claimed_within(cell, 4) == ["req-1"]
    assert cell.client.xlen(cell.keys.reruns(MODEL, "cpu")) == HIDING


def test_a_call_costs_the_same_however_many_are_passed_over(cell: Cell) -> None:
    cell.worker("small", split="1-4", pages=SMALL)
    first_runs(cell)
    claimed_within(cell, 1)
    costs = [commands(cell, lambda: claimed_within(cell, 1)) for _ in range(2)]
    for i in range(HIDING):
        assert cell.accept(f"req-more-{i}", need=SMALL + 1, limit=10_000).status == "OK"
    costs += [commands(cell, lambda: claimed_within(cell, 1)) for _ in range(6)]
    assert max(costs) < 3 * (8 + 32 + 128), costs
