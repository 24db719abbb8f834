"""Runs of several stages reserve KV pages as their log grows; where there are too few, the last request gives way."""

import pytest

from blockrelay.protocol.constants import MAX_DRAFTS, PAGE_TOKENS
from blockrelay.protocol.messages import Claimed, NextJob
from tests.support.cell import Cell, body

#: Tokens of a prompt that fills its first page with the next token and the drafts behind it.
PROMPT = PAGE_TOKENS - 1 - MAX_DRAFTS


def start(cell: Cell, *pages: int, requests: int = 1, need: int = 4) -> tuple[list[str], list[Claimed]]:
    """Starts a worker of each of two stages with `pages` pages, and runs of requests that grow to `need` pages each."""
    workers = [cell.worker(name, stage=stage, pages=pages[stage]) for stage, name in enumerate("ab")]
    for number in range(requests):
        cell.accept(f"req-{number}", need=need, content=body(list(range(PROMPT))))
    return workers, cell.claim(workers[0])


def reserved(cell: Cell, workers: list[str]) -> list[int]:
    return [cell.reserved(worker) for worker in workers]


def say(cell: Cell, run: Claimed, tokens: int, *, end: str = "") -> str:
    """Commits as many tokens behind those of the log."""
    position = len(cell.log(run.request_id))
    return cell.commit(run, position, list(range(position, position + tokens)), end=end).verdict


def test_a_run_reserves_what_it_knows_and_more_as_it_grows(cell: Cell) -> None:
    workers, (run,) = start(cell, 9, 9, need=3)
    assert reserved(cell, workers) == [1, 1], "prompt, the next token and drafts fill one page"
    assert say(cell, run, 1) == "OK"
    assert reserved(cell, workers) == [2, 2]
    assert say(cell, run, PAGE_TOKENS - 1) == "OK"
    assert reserved(cell, workers) == [2, 2]
    say(cell, run, 1)
    assert reserved(cell, workers) == [3, 3]
    say(cell, run, 2 * PAGE_TOKENS)
    assert reserved(cell, workers) == [3, 3], "all that it may ever need"
    say(cell, run, 1, end="stop")
    assert reserved(cell, workers) == [0, 0]


def test_several_tokens_at_once_may_need_several_pages(cell: Cell) -> None:
    workers, (run,) = start(cell, 9, 9)
    say(cell, run, 2 * PAGE_TOKENS)
    assert reserved(cell, workers) == [3, 3]


def test_the_request_that_came_last_gives_way_and_keeps_its_tokens(cell: Cell) -> None:
    workers, (first, last) = start(cell, 9, 3, requests=2, need=3)
    assert reserved(cell, workers) == [2, 2]
    assert say(cell, first, 1 + PAGE_TOKENS) == "OK"
    assert reserved(cell, workers) == [3, 3] and cell.requests_of_worker("b") == {"req-0"}
    assert (cell.record("req-1")["state"], cell.record("req-1")["rerun_reason"]) == ("queued", "preempted")
    assert say(cell, last, 1) == "LOST", "its run has ended"
    (told,) = cell.inbox("b", b"ended")
    assert told[b"again"] == b"1", "its workers hold its pages"
    jobs = [NextJob.decode(fields[b"next_job"]) for fields in cell.inbox("a") if b"next_job" in fields]
    assert [job.request_id for job in jobs] == ["req-0"]
    assert cell.claim("a") == [], "no page is free"
    say(cell, first, 1, end="stop")
    assert [run.request_id for run in cell.claim("a")] == ["req-1"]


def test_a_run_that_came_last_itself_gives_way_and_its_commit_counts(cell: Cell) -> None:
    workers, (_, last) = start(cell, 9, 3, requests=2, need=3)
    assert say(cell, last, 1 + PAGE_TOKENS) == "OK"
    assert reserved(cell, workers) == [1, 1] and cell.requests_of_worker("b") == {"req-0"}
    assert not [fields for fields in cell.inbox("a") if b"next_job" in fields]
    assert cell.record("req-1")["state"] == "queued" and len(cell.log("req-1")) == 1 + PAGE_TOKENS
    assert cell.claim("a") == [], "its third page is not there yet"


def test_giving_way_is_no_failed_attempt(cell: Cell) -> None:
    """Failed attempts at one length delay a request, and may end it."""
    _, (first, _) = start(cell, 9, 3, requests=2, need=3)
    say(cell, first, 1 + PAGE_TOKENS)
    assert cell.record("req-1")["attempts"] == "0" and cell.queued("reruns") == ["req-1"]


def test_only_as_many_give_way_as_are_needed(cell: Cell) -> None:
    workers, runs = start(cell, 7, 7, requests=4)
    say(cell, runs[1], 1 + 2 * PAGE_TOKENS)
    assert reserved(cell, workers) == [7, 7], "four of the second, and all others have theirs"
    say(cell, runs[0], 1)
    assert [cell.record(f"req-{number}")["state"] for number in range(4)] == ["running", "running", "running", "queued"]


def test_no_other_gives_way_for_a_run_that_has_to_itself(cell: Cell) -> None:
    """Requests that came later have pages enough on the first worker, and too few on the second."""
    first, last = cell.worker("a", stage=0, pages=20), cell.worker("b", stage=1, pages=4)
    cell.worker("c", stage=1, pages=20)
    for number in range(2):
        cell.accept(f"req-{number}", need=4, content=body(list(range(PROMPT))))
    runs = cell.claim(first)
    assert [run.route[1] for run in runs] == ["b", "c"]
    cell.client.hset(cell.keys.worker("a"), "pages", 2)
    cell.client.hset(cell.keys.worker(last), "pages", 1)
    assert say(cell, runs[0], 1) == "OK"
    assert [cell.record(f"req-{number}")["state"] for number in range(2)] == ["queued", "running"]


def test_a_member_without_a_run_on_the_worker_is_passed_over(cell: Cell) -> None:
    """There should be none; one would stop Redis if it was asked to give way again and again."""
    _, (first, _) = start(cell, 9, 3, requests=2, need=3)
    cell.client.hset(cell.keys.request("req-1"), "state", "queued")
    assert say(cell, first, 1 + PAGE_TOKENS) == "OK"
    assert cell.record("req-0")["state"] == "queued" and cell.requests_of_worker("b") == {"req-1"}


def test_a_pool_has_to_hold_all_that_a_request_may_need(cell: Cell) -> None:
    cell.worker("c", stage=1, pages=4)
    _, (run,) = start(cell, 9, 3)
    assert run.route == ("a", "c"), "it would never end on a pool of 3 pages"


@pytest.mark.parametrize(("pages", "each", "runs"), [(20, 1, 10), (2000, 95, 20)])
def test_beside_others_a_page_for_each_or_a_hundredth_of_the_pool_stays_free(
    cell: Cell, pages: int, each: int, runs: int
) -> None:
    cell.worker("a", stage=0, pages=10_000)
    cell.worker("b", stage=1, pages=pages)
    for number in range(pages // each):
        cell.accept(f"req-{number}", need=each + 1, content=body(list(range(each * PAGE_TOKENS - 1 - MAX_DRAFTS))))
    assert len(cell.claim("a", 64)) == runs


def test_a_request_with_tokens_is_not_overtaken_where_only_another_pool_can_hold_it(cell: Cell) -> None:
    """Else a worker with a small pool could fill the later one that both share, for as long as small requests come."""
    large, small = cell.worker("a", stage=0, pages=100), cell.worker("c", stage=0, pages=20)
    cell.worker("b", stage=1, pages=100)
    cell.accept("old", need=90, content=body(list(range(40 * PAGE_TOKENS))))
    (old,) = cell.claim(large)
    say(cell, old, 1)
    cell.rerun(old, "stalled")
    cell.accept("new", need=2)
    assert cell.claim(small) == []
    assert [run.request_id for run in cell.claim(large)] == ["old", "new"]
