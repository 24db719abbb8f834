"""CLAIM by a worker of the whole model: bounded by the pages that are free now instead of by reservations."""

from blockrelay.protocol.constants import MAX_DRAFTS, PAGE_TOKENS
from tests.support.cell import Cell, body


def test_one_stage_reserves_nothing_and_takes_what_fits_now(cell: Cell) -> None:
    worker_id = cell.worker("a", split="1-4", pages=5)
    for i in range(4):
        cell.accept(f"req-{i}", need=5, content=body(list(range(1, 17))))  # two pages with the first new token
    assert len(cell.claim(worker_id, free=5)) == 2
    assert cell.reserved(worker_id) == 0 and cell.queued() == ["req-2", "req-3"]
    assert cell.claim(worker_id, free=1) == []
    assert [c.request_id for c in cell.claim(worker_id, free=2)] == ["req-2"]


def test_one_stage_counts_the_tokens_that_a_rerun_has(cell: Cell) -> None:
    worker_id = cell.worker("a", split="1-4", pages=5)
    cell.accept(need=5, content=body(list(range(1, 15))))
    (run,) = cell.claim(worker_id, free=1)
    cell.commit(run, 0, [7, 8])
    cell.rerun(run)
    assert cell.claim(worker_id, free=1) == []
    assert len(cell.claim(worker_id, free=2)) == 1


def test_one_stage_leaves_what_could_never_end_on_it_to_a_larger_worker(cell: Cell) -> None:
    small, large = cell.worker("a", split="1-4", pages=4), cell.worker("b", split="1-4", pages=5)
    cell.accept(need=5)
    assert cell.claim(small) == []
    assert len(cell.claim(large)) == 1


def test_what_fits_nobody_does_not_hold_up_what_comes_after_it(cell: Cell) -> None:
    """Accepted while nobody had registered, so that nothing was known of pools."""
    cell.accept("large", need=5)
    cell.accept("small", need=4)
    assert [c.request_id for c in cell.claim(cell.worker("a", split="1-4", pages=4))] == ["small"]
    assert [c.request_id for c in cell.claim(cell.worker("b", split="1-4", pages=5))] == ["large"]


def test_what_fits_no_later_stage_does_not_hold_up_what_comes_after_it(cell: Cell) -> None:
    for name, pages in (("large", 5), ("small", 3), ("next", 2)):
        cell.accept(name, need=pages, content=body(list(range(PAGE_TOKENS * pages - MAX_DRAFTS - 1))))
    first, _ = cell.worker("a", stage=0, pages=20), cell.worker("b", stage=1, pages=4)
    assert [c.request_id for c in cell.claim(first)] == ["small"], "the next one waits for room, and has its turn"
    cell.worker("c", stage=1, pages=9)
    assert [c.request_id for c in cell.claim(first)] == ["large", "next"]
