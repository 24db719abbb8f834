"""The prefix cache: runs reuse pages of equal first tokens that were computed before, and no others."""

from typing import Any, Literal

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kv.prefix_cache import PrefixCache
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.runs.run import Run
from tests.support.worker.runs import new_run

LAYOUT = PageLayout(layers=1, kv_heads=1, head_dim=8)
PROMPT = list(range(100, 150))  # three full pages and two tokens


class Desk:
    """A run table with its pool and metrics, and the life of a run as the engine leads it."""

    def __init__(
        self,
        pages: int = 20,
        layout: PageLayout = LAYOUT,
        *,
        cache: bool = True,
        stage: int = 0,
        shares_private: bool = False,
        store: Any = None,
    ) -> None:
        self.registry = CollectorRegistry()
        metrics = WorkerMetrics(self.registry)
        self.pool = PagePool(layout, pages)
        known = PrefixCache(
            self.pool,
            model_hash="m",
            numerics="n",
            metrics=metrics,
            stage=stage,
            shares_private=shares_private,
            store=store,
        )
        self.table = RunTable(self.pool, known if cache else None)
        self._count = 0

    def run(self, prompt: list[int], *, skip_cache: bool = False, later: bool = False, **body: Any) -> Run:
        """A new run on the table; a `later` stage's adopts nothing by itself."""
        self._count += 1
        run = new_run(f"req-{self._count}", prompt, first=not later, skip_prefix_cache=skip_cache, **body)
        self.table.add(run)
        if not later:
            self.table.attach_prefix(run)
        return run

    def compute(self, run: Run, tokens: int | None = None) -> None:
        """As a step does: rows up to `tokens` (default: all)."""
        end = len(run.tokens) if tokens is None else tokens
        assert self.table.grow(run, end)
        run.tokens_computed(end)
        self.table.publish(run)

    def value(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"blockrelay_worker_prefix_cache_{name}_total")


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_second_request_with_the_same_beginning_computes_only_the_rest(desk: Desk) -> None:
    first = desk.run(PROMPT)
    desk.compute(first)
    pages = list(first.pages)
    desk.table.drop(first.request_id, first.run_id)
    second = desk.run([*PROMPT[:40], 7, 8, 9])
    assert (second.computed, second.pages, second.kv.cached) == (32, pages[:2], 32)
    assert second.missing == 11
    assert (desk.value("queries"), desk.value("hits")) == (50 + 43, 32)
    desk.table.check_integrity()


def test_requests_under_way_share_pages_at_once(desk: Desk) -> None:
    first = desk.run(PROMPT)
    desk.compute(first)
    second = desk.run(PROMPT)
    assert second.pages == first.pages[:3] and desk.pool.used_pages == 4
    desk.table.drop(first.request_id, first.run_id)
    desk.table.check_integrity()
    desk.compute(second)
    assert desk.pool.used_pages == 4


def test_the_last_known_token_is_always_computed(desk: Desk) -> None:
    """Its row is where the next token comes from, so that a prompt of whole pages is not found whole."""
    first = desk.run(PROMPT[:48])
    desk.compute(first)
    assert desk.run(PROMPT[:48]).computed == 32
    assert desk.run(PROMPT[:49]).computed == 48


@pytest.mark.parametrize(("logits", "found"), [("last", 48), ("all", 16)])
def test_rows_whose_logits_are_asked_for_are_computed(desk: Desk, logits: Literal["last", "all"], found: int) -> None:
    desk.compute(desk.run(PROMPT))
    assert desk.run(PROMPT, logits=logits, prior=20).computed == found


def test_another_salt_finds_nothing(desk: Desk) -> None:
    desk.compute(desk.run(PROMPT, salt="a"))
    assert desk.run(PROMPT).computed == 0
    assert desk.run(PROMPT, salt="b").computed == 0
    assert desk.run(PROMPT, salt="a").computed == 48


def test_a_run_that_skips_the_cache_takes_nothing_and_leaves_what_it_computed(desk: Desk) -> None:
    desk.compute(desk.run(PROMPT))
    skipping = desk.run(PROMPT, skip_cache=True)
    assert skipping.computed == 0 and skipping.pages == []
    desk.compute(skipping)
    assert set(skipping.pages).isdisjoint(desk.run(PROMPT).pages), "the first to name a page wins"


def test_without_a_cache_nothing_is_kept() -> None:
    desk = Desk(cache=False)
    first = desk.run(PROMPT)
    desk.compute(first)
    desk.table.drop(first.request_id, first.run_id)
    assert desk.pool.cached_pages == 0
    assert desk.run(PROMPT).computed == 0


def test_pages_behind_rows_that_were_wrong_lose_their_names(desk: Desk) -> None:
    first, beside = desk.run(PROMPT), desk.run(PROMPT)
    desk.compute(first)
    desk.table.distrust(first, 20)
    assert (first.computed, first.kv.published) == (20, 1)
    assert desk.run([*PROMPT, 7]).computed == 16, "the first page is right"
    desk.compute(beside)
    assert desk.run([*PROMPT, 8]).computed == 48, "others name theirs"
    desk.table.drop(first.request_id, first.run_id)
    desk.table.check_integrity()
    desk.table.distrust(beside, 50)
    assert (beside.computed, beside.kv.published) == (50, 3), "nothing lies behind"


def test_drafts_are_not_named(desk: Desk) -> None:
    run = desk.run(PROMPT[:30], later=True)
    run.receive(0, [*PROMPT[:30], 1, 2, 3])
    assert desk.table.grow(run, 33)
    run.tokens_computed(33)
    desk.table.publish(run, known=30)
    assert run.kv.published == 1
    run.receive(30, [4, 5, 6])  # the drafts were wrong
    desk.compute(run, 33)
    assert run.kv.published == 2
    assert desk.run([*PROMPT[:30], 4, 5, 9]).computed == 32
    assert desk.run([*PROMPT[:30], 1, 2, 9]).computed == 16


def test_generated_tokens_are_found_as_a_prompt(desk: Desk) -> None:
    """The next turn of a conversation."""
    run = desk.run(PROMPT[:30])
    desk.compute(run)
    for token in range(20):
        run.learn([token])
        desk.compute(run)
    assert desk.run([*run.tokens, 5]).computed == 48


def test_a_preempted_run_finds_its_own_pages_again(desk: Desk) -> None:
    run = desk.run(PROMPT)
    desk.compute(run)
    pages = list(run.pages)
    assert run.last is not None
    run.last.logits.append(np.zeros((1, 4), np.float32))
    desk.table.preempt(run)
    assert (run.computed, run.pages, run.last.logits, desk.pool.used_pages) == (0, [], [], 0)
    desk.table.attach_prefix(run)
    assert (run.computed, run.pages) == (48, pages[:3])
    assert desk.value("queries") == 50, "it is asked for once"
    desk.compute(run)
    desk.table.check_integrity()


def test_what_was_evicted_is_computed_again_and_counted() -> None:
    desk = Desk(pages=6)
    first = desk.run(PROMPT)
    desk.compute(first)
    desk.table.drop(first.request_id, first.run_id)
    other = desk.run(list(range(64)))
    desk.compute(other)
    assert desk.value("evictions") == 1
    assert desk.run(PROMPT).computed == 32, "the end of a beginning goes first"
    desk.table.check_integrity()


def test_a_later_stage_adopts_exactly_what_the_first_rows_lie_behind() -> None:
    desk = Desk(stage=1)
    desk.compute(desk.run(PROMPT))
    run = desk.run(PROMPT, later=True)
    desk.table.attach_prefix(run, exactly=32)
    assert run.computed == 32 and len(run.pages) == 2
    assert desk.value("hits") == 0, "the first stage counts"
    unknown = desk.run(PROMPT[:20] + list(range(60)), later=True)
    desk.table.attach_prefix(unknown, exactly=32)
    assert unknown.computed == 16, "the caller sees that it is not enough"


def test_a_stage_of_the_head_alone_lacks_nothing() -> None:
    desk = Desk(layout=PageLayout(layers=0, kv_heads=1, head_dim=8), cache=False)
    run = desk.run(PROMPT, later=True)
    desk.table.attach_prefix(run, exactly=48)
    assert run.computed == 48
    desk.compute(run)
    desk.table.check_integrity()


class Written:
    """A store that has nothing, and remembers what was put."""

    def __init__(self) -> None:
        self.names: list[bytes] = []

    def may_have(self, name: bytes, *, resumes: bool = False) -> bool:
        return False

    def put(self, page: int, name: bytes) -> None:
        self.names.append(name)


class TestPrivatePages:
    """Of requests that a device has a part in which does not compute the same bits twice."""

    def test_are_found_by_nobody_else(self, desk: Desk) -> None:
        desk.compute(desk.run(PROMPT, private=True))
        assert desk.run(PROMPT, private=True).computed == desk.run(PROMPT).computed == 0

    def test_are_found_in_the_same_pool_where_that_is_allowed(self) -> None:
        store = Written()
        desk = Desk(shares_private=True, store=store)
        first = desk.run(PROMPT, private=True, salt="tenant")
        desk.compute(first)
        own = list(store.names)
        second = desk.run(PROMPT, private=True, salt="tenant")
        assert second.pages == first.pages[:3] and (second.computed, second.kv.cached) == (48, 48)
        assert (desk.value("queries"), desk.value("hits")) == (100, 48)
        # By no tenant but theirs, by no request that is exact, and in no other life of the device
        assert desk.run(PROMPT, private=True, salt="other").computed == desk.run(PROMPT, salt="tenant").computed == 0
        assert Desk(shares_private=True).run(PROMPT, private=True, salt="tenant").computed == 0
        # And a stand-in finds them in the store by the names of either request, which are not the pool's
        assert len(own) == 3 and len(store.names) == 6 and len(set(store.names)) == 6
        assert own == first.kv.hashes and store.names[3:] == second.kv.hashes
        assert not set(store.names) & set(first.kv.local_hashes) and first.kv.local_hashes == second.kv.local_hashes

    def test_are_found_by_later_steps_of_the_session(self) -> None:
        """And a stand-in finds them in the store by the names of each step."""
        store = Written()
        desk = Desk(store=store)
        first = desk.run(PROMPT, private=True, session="s", salt="tenant")
        desk.compute(first)
        second = desk.run(PROMPT, private=True, session="s", salt="tenant")
        assert second.pages == first.pages[:3] and (second.computed, second.kv.cached) == (48, 48)
        assert len(set(store.names)) == 6 and store.names[3:] == second.kv.hashes
        for session, salt in (("t", "tenant"), ("s", "other"), ("", "tenant")):
            assert desk.run(PROMPT, private=True, session=session, salt=salt).computed == 0, (session, salt)
        assert desk.run(PROMPT, session="s", salt="tenant").computed == 0, "nor by one that is exact"
        assert (desk.value("queries"), desk.value("hits")) == (250, 48), "of steps, and of the exact one"
        assert Desk().run(PROMPT, private=True, session="s").computed == 0

    def test_are_found_by_later_steps_behind_the_same_workers_alone(self) -> None:
        """What a device has made of wrong numbers is behind its pages in later stages too, and goes with it."""
        desk = Desk(stage=1)

        def begun(before: str, after: str = "head", *, later: bool = True) -> Run:
            return desk.run(PROMPT, later=later, private=True, session="s", route=(before, "cpu", after))

        desk.compute(begun("gpu"))
        for step, found in (
            (begun("gpu"), 32),
            (begun("gpu", "another"), 32),
            (begun("stand-in"), 0),
            (begun("gpu-again"), 0),
        ):
            desk.table.attach_prefix(step, exactly=32)
            assert (step.computed, step.kv.cached) == (found, found), step.route
            desk.table.drop(step.request_id, step.run_id)
        # And what is computed there is found there
        desk.compute(begun("stand-in"))
        assert begun("stand-in", later=False).computed == 48
        desk.table.check_integrity()

    def test_of_a_step_are_found_in_a_later_stage_up_to_where_it_has_them(self) -> None:
        """So that it can say how far: the step begins there, in all stages."""
        desk = Desk(stage=1)
        desk.compute(desk.run(PROMPT, private=True, session="s"), 32)
        step = desk.run(PROMPT, later=True, private=True, session="s")
        desk.table.attach_prefix(step, exactly=48)
        assert step.computed == 32
        again = desk.run(PROMPT, later=True, private=True, session="s")
        desk.table.attach_prefix(again, exactly=step.computed)
        assert again.computed == 32 and again.pages == step.pages[:2]

    def test_are_not_taken_where_the_client_gives_its_own(self) -> None:
        desk = Desk()
        desk.compute(desk.run(PROMPT, private=True, session="s"))
        assert desk.run(PROMPT, private=True, session="s", kv_given=32).computed == 0
        assert desk.run(PROMPT, private=True, session="s").computed == 48

    def test_of_two_that_compute_the_same_at_once_the_first_is_found(self) -> None:
        desk = Desk(shares_private=True, store=Written())
        first, second = desk.run(PROMPT, private=True), desk.run(PROMPT, private=True)
        desk.compute(first)
        desk.compute(second)
        assert set(first.pages).isdisjoint(second.pages)
        third = desk.run(PROMPT, private=True)
        assert third.pages == first.pages[:3]
        for run in (first, second, third):
            desk.table.drop(run.request_id, run.run_id)
        desk.table.check_integrity()
        assert desk.run(PROMPT, private=True).computed == 48

    def test_behind_pages_of_another_worker_are_the_requests_own(self) -> None:
        desk = Desk(shares_private=True)
        first = desk.run(PROMPT, private=True)
        desk.compute(first, 16)
        # Given that its first page had come from the store
        first.kv.shared = 0
        desk.compute(first)
        assert desk.run(PROMPT, private=True).computed == 16, "what was computed before it"
        desk.table.preempt(first)
        desk.table.attach_prefix(first)
        assert first.computed == 48, "by the names of the request"
