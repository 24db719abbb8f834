"""Runs of one beginning that come together: one computes it, the others wait for its pages, and none waits for ever."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.kernels.specification import PAGE
from blockrelay_worker.kv.shared_prefill import Prefill, waiting
from blockrelay_worker.scheduling.step_cost import StepCost
from tests.support.cell import Cell
from tests.support.worker.first_stage import Stage

PROMPT = list(range(100, 200))  # six full pages and four tokens
#: A step has some 24 tokens of prompts: a page and a half.
SLOW = StepCost(decode_s=0.01, prompt_token_s=0.004, by_tokens={1: 0.01})


@pytest.fixture
def whole(w8a8: BlockFolder, cell: Cell) -> Stage:
    return Stage(w8a8, cell, last=5, cached=True)


@pytest.fixture
def front(w8a8: BlockFolder, cell: Cell) -> Stage:
    return Stage(w8a8, cell, last=2, pages=100, cached=True)


def computed_rows(stage: Stage, cost: StepCost | None = None) -> dict[str, int]:
    """The rows that each run computes until there is nothing left to compute."""
    rows: dict[str, int] = {}
    while work := stage.step(cost):
        for item in work:
            rows[item.run.request_id] = rows.get(item.run.request_id, 0) + item.rows
    stage.table.check_integrity()
    return rows


@pytest.mark.parametrize("cost", [StepCost(), SLOW])
def test_one_run_computes_the_prompt_and_the_others_share_its_pages(whole: Stage, cost: StepCost) -> None:
    runs = [whole.run(name, PROMPT, computed=0) for name in "abcd"]
    assert computed_rows(whole, cost) == {"a": 100, "b": 4, "c": 4, "d": 4}
    assert [run.kv.cached for run in runs] == [0, 96, 96, 96] and not any(run.missing for run in runs)
    assert whole.table.pool.used_pages == 6 + 4


def test_what_differs_is_computed_as_soon_as_it_is_reached(whole: Stage) -> None:
    whole.run("a", PROMPT, computed=0)
    whole.run("b", PROMPT[:40] + [7] * 60, computed=0)
    whole.run("c", PROMPT[:40] + [7] * 50, computed=0)
    whole.run("other", [9] * 50, computed=0)
    assert computed_rows(whole, SLOW) == {"a": 100, "b": 68, "c": 90 - 80, "other": 50}


def test_a_run_that_comes_in_the_middle_goes_on_behind_the_first(whole: Stage) -> None:
    whole.run("a", PROMPT, computed=0)
    whole.step(SLOW)
    late = whole.run("b", PROMPT, computed=0)
    assert 0 < late.computed < 96
    assert computed_rows(whole, SLOW)["b"] == 4


@pytest.mark.parametrize("kept_apart", [{"salt": "s"}, {"private": True}, {"skip_prefix_cache": True}])
def test_runs_that_share_no_pages_do_not_wait(whole: Stage, kept_apart: dict[str, Any]) -> None:
    whole.run("a", PROMPT, computed=0)
    whole.run("b", PROMPT, computed=0, **kept_apart)
    assert computed_rows(whole) == {"a": 100, "b": 100}


@pytest.mark.parametrize("stage", ["whole", "front"])
def test_a_run_goes_on_alone_when_the_first_one_leaves(stage: str, request: pytest.FixtureRequest) -> None:
    place: Stage = request.getfixturevalue(stage)
    place.run("a", PROMPT, computed=0)
    place.run("b", PROMPT, computed=0)
    first = place.step(SLOW)
    assert [item.run.request_id for item in first] == ["a"]
    assert place.table.drop("a", "a")
    assert computed_rows(place, SLOW) == {"b": 100 - first[0].rows // PAGE * PAGE}


def test_behind_a_quarantined_run_nobody_waits(whole: Stage) -> None:
    whole.run("a", PROMPT, computed=0).quarantined_until = 100
    whole.run("b", PROMPT, computed=0)
    assert computed_rows(whole)["b"] in (4, 100), "by what the first one had published when it came to it"


def test_on_several_stages_pages_are_shared_when_all_stages_have_them(front: Stage) -> None:
    first = front.run("a", PROMPT, computed=0)
    elsewhere = front.run("elsewhere", PROMPT, computed=0, route=(front.route[0], "another"))
    others = [front.run(name, PROMPT, computed=0) for name in "bc"]
    assert computed_rows(front) == {"a": 100, "elsewhere": 100}
    assert [run.computed for run in others] == [0, 0], "a later stage may not have its rows yet"
    first.learn([5])
    assert first.first is not None and elsewhere.first is not None
    first.first.claimed = elsewhere.first.claimed = None
    assert computed_rows(front) == {"a": 1, "b": 4, "c": 4}


def test_on_several_stages_nobody_waits_for_a_prompt_that_shares_little(front: Stage) -> None:
    front.run("long", PROMPT, computed=0)
    front.run("short", PROMPT[:16] + [7] * 20, computed=0)
    assert computed_rows(front) == {"long": 100, "short": 36}


def prefill(name: str, names: Sequence[bytes], computed: int = 0, wanted: int | None = None, **more: Any) -> Prefill:
    return Prefill(
        request_id=name,
        route=more.pop("route", ()),
        names=names,
        computed=computed,
        wanted=len(names) if wanted is None else wanted,
        certain=computed,
        **more,
    )


def test_only_older_runs_are_waited_for() -> None:
    names = [b"1", b"2", b"3"]
    assert waiting([prefill("a", names), prefill("b", names)]) == {"b"}
    assert waiting([prefill("a", names, computed=15), prefill("b", names)]) == {"b"}, "the page is not full"
    assert waiting([prefill("a", names, computed=16), prefill("b", names)]) == frozenset()
    assert waiting([prefill("a", names), prefill("b", names, wanted=0)]) == frozenset()
    assert waiting([prefill("a", names[:1]), prefill("b", names, computed=16)]) == frozenset()
    assert waiting([prefill("a", ()), prefill("b", ())]) == frozenset()
    assert waiting([prefill("a", names, route=("x",)), prefill("b", names, route=("y",))]) == frozenset()


def test_a_run_that_waits_is_waited_for_by_no_other() -> None:
    """Else a chain of them would each wait for the one before."""
    order = [prefill("a", [b"1"]), prefill("b", [b"1", b"2"]), prefill("c", [b"1", b"2"], computed=16)]
    assert waiting(order) == {"b"}


@given(
    st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=5), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
def test_every_prompt_is_computed_whatever_leaves(
    w8a8: BlockFolder, cell: Cell, prompts: list[list[int]], leaving: list[int]
) -> None:
    """Prompts of a few kinds of pages; some runs leave between steps. No step is empty while tokens are missing."""
    stage = Stage(w8a8, cell, last=5, pages=200, cached=True)
    for index, kinds in enumerate(prompts):
        stage.run(str(index), [kind for kind in kinds for _ in range(PAGE)] + [3], computed=0)
    left = list(leaving)
    while any(run.missing for run in stage.table.all()):
        assert stage.step(SLOW)
        stage.table.check_integrity()
        if left:
            name = str(left.pop())
            stage.table.drop(name, name)
