"""Workers take more requests than their pages hold: some give their pages back and finish with the same tokens."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blockrelay.protocol.transitions import calls
from tests.support.systems.system import StartSystem, System, assert_nothing_is_held, make_jobs, serve

#: Of the tiny model's four layers: keys and values, 2 heads of 16, 16 tokens, float16.
PAGE_BYTES = 2 * 4 * 2 * 16 * 16 * 2


def test_more_requests_than_pages_all_finish_with_their_own_tokens(start_system: StartSystem) -> None:
    system = start_with_pages(start_system, 12)
    jobs = make_jobs(20, seed=21, vocab=500, longest=60, tokens=70)
    serve(system, jobs)
    assert system.metric("blockrelay_worker_num_preemptions_total") > 0
    assert system.reruns() == {}, "nobody was queued again"
    assert system.metric("blockrelay_worker_commit_seconds_count") > 0
    assert_nothing_is_held(system)


def test_without_a_prefix_cache_the_preempted_compute_everything_again(start_system: StartSystem) -> None:
    system = start_with_pages(start_system, 10, prefix_cache="false", speculation="off")
    jobs = make_jobs(8, seed=22, vocab=500, longest=40, tokens=100)
    serve(system, jobs)
    assert system.metric("blockrelay_worker_num_preemptions_total") > 0


def test_a_request_that_needs_the_whole_pool_runs_and_a_larger_one_is_refused(start_system: StartSystem) -> None:
    system = start_with_pages(start_system, 8)
    large, *others = make_jobs(6, seed=23, vocab=500, longest=20, tokens=60)
    large = replace(large, prompt=tuple(range(3, 71)))  # 68 + 60 tokens: eight pages
    serve(system, [large, *others])
    too_large = calls.accept("req-x", large.body, model=system.model_key, pages_needed=9, max_in_flight=10)
    assert system.scripts.run(too_large) == calls.Accepted("TOO_LARGE", "8")


@pytest.mark.parametrize("prefix_cache", ["true", "false"])
def test_on_several_stages_the_last_requests_give_way_and_finish_with_their_own_tokens(
    start_system: StartSystem, tmp_path: Path, prefix_cache: str
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"stages": [{"blocks": "1-2"}, {"blocks": "3-5"}]}))  # two of the four layers each
    pages = {"kv_bytes": str(12 * PAGE_BYTES // 2), "prefix_cache": prefix_cache}
    system = start_system(stages=2, worker=pages, scheduler_env={"BLOCKRELAY_PLAN": str(plan)})
    assert [w.pages for w in system.infos()] == [12, 12]
    jobs = make_jobs(20, seed=24, vocab=500, longest=60, tokens=70)
    serve(system, jobs)
    # With a cache one stage may still have the pages of a beginning when the other has lost them.
    assert set(system.reruns()) - ({"missing_pages"} if prefix_cache == "true" else set()) == {"preempted"}
    assert_nothing_is_held(system)


def start_with_pages(start_system: StartSystem, pages: int, **worker: str) -> System:
    """One worker of the whole model with a pool of `pages` pages."""
    system = start_system(stages=1, worker={"kv_bytes": str(pages * PAGE_BYTES), **worker})
    assert [w.pages for w in system.infos()] == [pages]
    return system
