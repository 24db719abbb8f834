"""A cell of many workers: the cost of ACCEPT and CLAIM does not grow with it, and no worker is overlooked."""

from collections.abc import Callable

import pytest

from blockrelay.protocol.capabilities import Pace
from blockrelay.protocol.transitions import calls
from blockrelay.protocol.transitions.calls import Limits
from blockrelay.redis.cell_settings import CellSettings, publish_cell_settings
from tests.support.cell import MODEL, Cell, begin_cell
from tests.support.waiting import wait_until

FEW, MANY = 20, 200
ONE, TWO = "1-4", "1-2,3-4"


def staffed(cell: Cell, count: int, split: str) -> None:
    """`count` workers at each stage, by the names of stage and number; those of the first have measured themselves."""
    begin_cell(cell.client, cell.keys)
    publish_cell_settings(cell.client, cell.keys, CellSettings(retention_s=60, dead_after_ms=600_000))
    for stage in range(split.count(",") + 1):
        for i in range(count):
            cell.worker(f"{stage}-{i}", stage=stage, split=split)
            if stage == 0:
                cell.scripts.run(calls.heartbeat(f"0-{i}", Pace(row_s=0.001, steps={1: 0.01, 4: 0.04, 16: 0.1})))


def commands(cell: Cell, action: Callable[[], object]) -> int:
    """How many commands the action took, those in scripts included."""
    cell.client.config_resetstat()
    action()
    stats: dict[str, dict[str, int]] = cell.client.info("commandstats")  # pyright: ignore
    return sum(int(s["calls"]) for name, s in stats.items() if not name.startswith("cmdstat_config"))


def test_accept_costs_the_same_whoever_there_is(cell: Cell) -> None:
    def cost(count: int) -> int:
        staffed(cell, count, ONE)
        limits = Limits(wait_s=1000, overcommit=64, enforce_deadline=True)
        cell.accept("req-first", limits=limits)
        return commands(cell, lambda: cell.accept("req-next", limits=limits))

    assert cost(FEW) == cost(MANY)


MORE = [pytest.param(*one, marks=pytest.mark.thorough) for one in ((ONE, 4), (TWO, 0))]


@pytest.mark.parametrize(("split", "jobs"), [(ONE, 0), (TWO, 4), *MORE])
def test_claim_costs_the_same_whoever_there_is(cell: Cell, split: str, jobs: int) -> None:
    def cost(count: int) -> int:
        staffed(cell, count, split)
        for i in range(1 + jobs):
            cell.accept(f"req-{i}")
        assert len(cell.claim("0-0", 1)) == 1  # from now on the registry is known
        return commands(cell, lambda: cell.claim("0-1", 4))

    assert cost(FEW) == cost(MANY)


def test_the_only_live_worker_of_a_stage_is_found_among_many(cell: Cell) -> None:
    staffed(cell, 50, TWO)
    for i in range(50):
        if i != 31:
            cell.client.delete(cell.keys.inbox(f"1-{i}"))
    cell.accept()
    found = []
    wait_until(lambda: found.extend(cell.claim("0-0")) or found, "some claim has looked at it")
    assert found[0].route == ("0-0", "1-31")


def test_who_comes_and_who_goes_counts_at_once(cell: Cell) -> None:
    cell.worker("a", pages=10, split=ONE)
    limits = Limits(overcommit=1)
    assert cell.accept("req-1", need=10, limits=limits).status == "OK"
    assert cell.accept("req-2", need=10, limits=limits).status == "PAGES"
    cell.worker("b", pages=10, split=ONE)
    assert cell.accept("req-2", need=10, limits=limits).status == "OK"
    cell.scripts.run(calls.dead("b", silent_s=0))
    assert cell.accept("req-3", need=1, limits=limits).status == "PAGES"


def test_what_is_kept_of_the_registry_is_kept_for_a_second(cell: Cell) -> None:
    cell.worker("a", split=ONE)
    cell.accept()
    assert 0 < cell.client.pttl(cell.keys.fleet(MODEL)) <= 1000  # pyright: ignore
