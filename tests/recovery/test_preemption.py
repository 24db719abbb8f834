"""Workers take more requests than their pages hold: some give their pages back and finish with the same tokens."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from blockrelay.protocol.transitions import calls
from tests.support.systems.system import (
    StartSystem,
    System,
    assert_nothing_is_held,
    assert_undisturbed,
    make_jobs,
    serve,
)
from tests.support.waiting import wait_until

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


@pytest.mark.parametrize("stages", [1, 2])
def test_pages_that_went_to_a_disk_come_back_and_leave_it(
    start_system: StartSystem, tmp_path: Path, stages: int
) -> None:
    swap = tmp_path / "swap"
    pages = {"kv_bytes": str(12 * PAGE_BYTES), "swap_folder": str(swap)}
    system = start_system(stages=stages, worker=pages)
    serve(system, make_jobs(20, seed=25, vocab=500, longest=60, tokens=70))
    for direction in ("out", "in"):
        assert system.metric("blockrelay_worker_swapped_pages_total", direction=direction) > 0
        assert system.metric("blockrelay_worker_swap_seconds_total", direction=direction) > 0
    assert system.metric("blockrelay_worker_page_store_hits_total", tier="swap") > 0
    if stages == 1:
        wait_until(lambda: pages_in(swap) == 0, "requests that have ended leave nothing on the disk")
    assert_nothing_is_held(system)


def test_a_worker_that_is_killed_while_pages_go_to_the_disk_loses_nothing(
    start_system: StartSystem, tmp_path: Path
) -> None:
    swap = tmp_path / "swap"
    settings = {"kv_bytes": str(12 * PAGE_BYTES), "swap_folder": str(swap)}
    system = start_system(stages=1, worker={**settings, "inject_speed": "0.3"})
    jobs = make_jobs(12, seed=26, vocab=500, longest=60, tokens=70)
    for job in jobs:
        system.accept(job)
    wait_until(lambda: pages_in(swap) > 0, "pages go to the disk")
    (worker,) = system.workers
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert swap.stat().st_mode & 0o777 == 0o700
    system.start_worker(**settings)
    assert_undisturbed(system, jobs)
    wait_until(lambda: pages_in(swap) == 0, "the next worker has emptied the folder, and lets all of its pages go")


@pytest.mark.parametrize("fault", ["open to others", "too little room"])
def test_a_swap_folder_that_cannot_be_used_is_refused_or_done_without(
    start_system: StartSystem, tmp_path: Path, fault: str
) -> None:
    swap = tmp_path / "swap"
    settings = {"kv_bytes": str(12 * PAGE_BYTES), "swap_folder": str(swap)}
    if fault == "open to others":
        swap.mkdir(mode=0o755)
        system = start_system(stages=1, worker={"kv_bytes": str(12 * PAGE_BYTES)})
        refused = system.start_worker(**settings)
        assert refused.wait(timeout=30) == 2
        return
    system = start_system(stages=1, worker={**settings, "swap_bytes": "1"})
    serve(system, make_jobs(12, seed=27, vocab=500, longest=60, tokens=70))
    assert system.metric("blockrelay_worker_num_preemptions_total") > 0
    assert pages_in(swap) == 0


def pages_in(folder: Path) -> int:
    """The number of pages in a swap folder."""
    return len(list(folder.glob("*.*-*")))


def start_with_pages(start_system: StartSystem, pages: int, **worker: str) -> System:
    """One worker of the whole model with a pool of `pages` pages."""
    system = start_system(stages=1, worker={"kv_bytes": str(pages * PAGE_BYTES), **worker})
    assert [w.pages for w in system.infos()] == [pages]
    return system
