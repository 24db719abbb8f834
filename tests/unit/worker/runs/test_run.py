"""The tokens of a run, known and computed: each change is checked, and impossible ones are refused."""

import pytest

from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.runs.run import Run
from tests.support.worker.runs import new_run

LAYOUT = PageLayout(layers=1, kv_heads=1, head_dim=8)


def on_a_table(run: Run) -> RunTable:
    table = RunTable(PagePool(LAYOUT, 20))
    table.add(run)
    assert table.grow(run, 100)
    return table


def test_more_than_is_known_is_never_computed() -> None:
    run = new_run("p", [1, 2, 3])
    on_a_table(run)
    with pytest.raises(AssertionError, match="more is computed than is known"):
        run.tokens_computed(4)


def test_nothing_is_computed_without_a_page() -> None:
    run = new_run("p", [1] * 40)
    table = RunTable(PagePool(LAYOUT, 20))
    table.add(run)
    assert table.grow(run, 16)
    run.tokens_computed(16)
    with pytest.raises(AssertionError, match="no page holds"):
        run.tokens_computed(17)


def test_a_step_never_goes_back_and_only_guesses_are_taken_back() -> None:
    run = new_run("p", [1, 2, 3, 4], first=False)
    on_a_table(run)
    run.tokens_computed(4)
    with pytest.raises(AssertionError, match="4 already"):
        run.tokens_computed(3)
    run.forget_from(2)
    assert (list(run.tokens), run.computed) == ([1, 2], 2)
    with pytest.raises(AssertionError, match="rows before these are missing"):
        run.receive(3, [5])


def test_a_sealed_page_is_never_computed_again() -> None:
    run = new_run("p", [1] * 20, first=False)
    on_a_table(run)
    run.tokens_computed(20)
    run.kv.mark_published(1)
    run.receive(17, [3, 3])
    with pytest.raises(AssertionError, match="a published page is not computed"):
        run.receive(15, [3])


def test_tokens_that_are_committed_are_computed_but_for_the_last() -> None:
    run = new_run("p", [1, 2, 3])
    on_a_table(run)
    run.tokens_computed(3)
    run.commit([7, 8, 9])
    assert (list(run.tokens), run.computed, run.missing) == ([1, 2, 3, 7, 8, 9], 5, 1)
    assert run.last is not None and run.last.committed == 3


def test_what_was_preempted_begins_anew() -> None:
    run = new_run("p", [1, 2, 3])
    table = on_a_table(run)
    run.tokens_computed(3)
    table.preempt(run)
    assert (run.computed, run.pages, run.kv.preemptions, run.missing) == (0, [], 1, 3)
    table.check_integrity()
