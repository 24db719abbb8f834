"""The scripts that change a request, each on a real server: what it promises, called twice, and with a stale run."""

from typing import Any

import pytest

from blockrelay.protocol.encoding.fallback_event import FallbackEvent
from blockrelay.protocol.messages import CommitAnswer, Ended, EndEntry, NextJob, TokenEntry
from blockrelay.protocol.transitions import calls
from tests.support.cell import MODEL, Cell, body


def test_a_request_goes_from_accept_to_its_terminal_entry(cell: Cell) -> None:
    first, last = cell.worker("a", stage=0), cell.worker("b", stage=1)
    assert cell.accept().status == "OK"
    (run,) = cell.claim(first)
    assert run.route == (first, last) and run.tokens == () and run.body.prompt.tolist() == [1, 2, 3]
    assert cell.commit(run, 0, [7]) == CommitAnswer("OK", 1)
    assert NextJob.decode(cell.inbox(first)[0][b"next_job"]) == NextJob(
        request_id="req-1", run_id=run.run_id, position=0, tokens=(7,)
    )
    assert cell.commit(run, 1, [8], end="stop") == CommitAnswer("OK", 2)
    *tokens, end = cell.log()
    assert tokens == [TokenEntry(1, 7, numerics="n1"), TokenEntry(2, 8)]
    assert isinstance(end, EndEntry) and end.reason == "stop" and end.position == 3 and end.numerics == "n1"
    assert cell.record()["state"] == "done" and cell.reserved(first) == cell.reserved(last) == 0
    assert len(cell.inbox(first)) == 1, "a finished request has no next job"
    for member in (first, last):
        (told,) = cell.inbox(member, b"ended")
        assert Ended.decode(told[b"ended"]) == Ended(request_id="req-1", run_id=run.run_id)
        assert told[b"again"] == b"0"


class TestAccept:
    def test_twice_is_one_request(self, cell: Cell) -> None:
        assert cell.accept().status == "OK"
        assert cell.accept() == calls.Accepted("EXISTS", "queued")
        assert cell.queued() == ["req-1"]

    def test_over_the_limit_leaves_nothing(self, cell: Cell) -> None:
        cell.accept("req-1", limit=1)
        assert cell.accept("req-2", limit=1) == calls.Accepted("BUSY", "1", retry_ms=1000)
        assert not cell.record("req-2") and cell.queued() == ["req-1"]

    def test_what_fits_no_pool_even_alone_is_refused(self, cell: Cell) -> None:
        cell.worker("a", stage=0, pages=50)
        cell.worker("b", stage=1, pages=4)
        assert cell.accept(need=5) == calls.Accepted("TOO_LARGE", "4")
        assert not cell.record()

    def test_without_workers_it_waits(self, cell: Cell) -> None:
        assert cell.accept(need=10_000).status == "OK"

    def test_goes_to_the_class_of_the_plan(self, cell: Cell) -> None:
        cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
        cell.accept()
        assert cell.queued("queue", "gpu") == ["req-1"]


class TestSessions:
    def step(self, cell: Cell, request_id: str, step: int, *, fp: str = "f", length: int = 0) -> calls.Accepted:
        part = calls.SessionStep("s", step, fp, length, (5).to_bytes(4, "little"))
        return cell.accept(request_id, session=part)

    def test_steps_follow_each_other(self, cell: Cell) -> None:
        assert self.step(cell, "req-1", 1).status == "OK"
        assert self.step(cell, "req-2", 2, length=1).status == "OK"
        assert cell.client.hget(cell.keys.session("s"), "tokens") == (5).to_bytes(4, "little") * 2

    def test_the_same_step_with_the_same_body_is_the_same_request(self, cell: Cell) -> None:
        self.step(cell, "req-1", 1)
        assert self.step(cell, "req-2", 1) == calls.Accepted("REPEAT", "req-1")
        assert not cell.record("req-2")

    @pytest.mark.parametrize(("step", "fp"), [(1, "other"), (3, "f"), (0, "f")])
    def test_any_other_step_is_refused_and_names_the_expected_one(self, cell: Cell, step: int, fp: str) -> None:
        self.step(cell, "req-1", 1)
        assert self.step(cell, "req-2", step, fp=fp, length=1) == calls.Accepted("STEP", "2")
        assert not cell.record("req-2")

    def test_a_step_that_failed_may_be_sent_again_without_growing_the_session(self, cell: Cell) -> None:
        self.step(cell, "req-1", 1)
        cell.scripts.run(calls.finish("req-1", "error"))
        assert self.step(cell, "req-2", 1).status == "OK"
        assert cell.client.hget(cell.keys.session("s"), "length") == b"1"


class TestClaim:
    def test_nothing_while_a_stage_has_no_live_worker(self, cell: Cell) -> None:
        first = cell.worker("a", stage=0)
        cell.accept()
        assert cell.claim(first) == [] and cell.queued() == ["req-1"]

    def test_a_silent_worker_is_no_route_member(self, cell: Cell) -> None:
        first, last = cell.worker("a", stage=0), cell.worker("b", stage=1)
        cell.client.zadd(cell.keys.workers, {last: 1})
        cell.accept()
        assert cell.claim(first) == []

    def test_a_claimed_job_is_gone_and_cannot_be_claimed_again(self, cell: Cell) -> None:
        first, _ = cell.worker("a", stage=0), cell.worker("b", stage=1)
        cell.accept()
        assert len(cell.claim(first)) == 1
        assert cell.claim(first) == [] and cell.queued() == []

    def test_a_lost_reply_leaves_the_request_where_the_beat_finds_it(self, cell: Cell) -> None:
        first, _ = cell.worker("a", stage=0), cell.worker("b", stage=1)
        run = cell.begin(first)
        assert cell.scripts.run(calls.heartbeat(first)) == {"req-1": run.run_id}

    def test_reruns_come_before_first_runs(self, cell: Cell) -> None:
        first, _ = cell.worker("a", stage=0), cell.worker("b", stage=1)
        run = cell.begin(first)
        cell.accept("req-2")
        cell.rerun(run)
        assert [c.request_id for c in cell.claim(first)] == ["req-1", "req-2"]

    def test_pages_are_reserved_on_every_stage_and_bound_what_is_claimed(self, cell: Cell) -> None:
        first, last = cell.worker("a", stage=0, pages=100), cell.worker("b", stage=1, pages=5)
        for i in range(3):
            cell.accept(f"req-{i}", need=2, content=body(list(range(20))))
        assert len(cell.claim(first)) == 2
        assert (cell.reserved(first), cell.reserved(last)) == (4, 4)
        assert cell.queued() == ["req-2"]

    def test_the_least_loaded_worker_of_a_stage_is_chosen(self, cell: Cell) -> None:
        first, one, two = cell.worker("a", stage=0), cell.worker("b1", stage=1), cell.worker("b2", stage=1)
        for i in range(4):
            cell.accept(f"req-{i}")
        cell.claim(first)
        assert len(cell.requests_of_worker(one)) == len(cell.requests_of_worker(two)) == 2

    def test_a_route_never_mixes_splits_or_numerics(self, cell: Cell) -> None:
        first = cell.worker("a", stage=0)
        cell.worker("b", stage=1, split="1-1,2-4")
        cell.worker("c", stage=1, numerics="n2")
        cell.accept()
        assert cell.claim(first) == []

    def test_a_gpu_worker_takes_gpu_jobs_and_cpu_jobs_stay_with_cpu_workers(self, cell: Cell) -> None:
        cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
        gpu, cpu = cell.worker("g", split="1-4", device="gpu"), cell.worker("c", split="1-4")
        cell.accept()
        assert cell.claim(cpu) == [], "while a GPU worker lives its jobs are not taken by the CPU"
        (run,) = cell.claim(gpu)
        assert cell.rerun(run, "gpu_error", block="block_1", detail="gpu_memory_error", code="OOM")
        assert cell.claim(gpu) == []
        (again,) = cell.claim(cpu)
        assert again.route_class == "cpu" and again.route == ("c",)
        cell.commit(again, 0, [1], end="stop")
        end = cell.log()[-1]
        event = FallbackEvent(
            block_id="block_1", source="GPU", target="CPU", reason="gpu_memory_error", error_code="OOM", success=True,
            position=0, blocks=("block_1", "block_2", "block_3", "block_4"),
        )  # fmt: skip
        assert isinstance(end, EndEntry) and end.fallbacks == (event,)
        assert end.executed == (0, 4), "the GPU has committed nothing"

    @pytest.mark.parametrize(
        ("before", "after", "reason", "success"),
        [
            ([7, 8], [], "cancelled", False),  # what the GPU committed says nothing about the CPU
            ([7, 8], [9], "cancelled", True),
            ([], [], "error", False),
            ([], [], "tensor", True),  # commits no token
            ([7], [], "length", True),
        ],
    )
    def test_a_fallback_succeeded_once_the_cpu_has_committed_something(
        self, cell: Cell, before: list[int], after: list[int], reason: Any, success: bool
    ) -> None:
        cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
        gpu, cpu = cell.worker("g", split="1-4", device="gpu"), cell.worker("c", split="1-4")
        run = cell.begin(gpu)
        if before:
            cell.commit(run, 0, before)
        cell.rerun(run, "gpu_error", block="block_2")
        (again,) = cell.claim(cpu)
        if after:
            cell.commit(again, len(before), after)
        if reason in ("tensor", "length"):
            cell.commit(again, len(before) + len(after), [], end=reason)
        else:
            cell.scripts.run(calls.finish("req-1", reason))
        end = cell.end()
        assert [event.success for event in end.fallbacks] == [success]

    def test_without_a_gpu_worker_the_cpu_takes_gpu_jobs(self, cell: Cell) -> None:
        cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
        cpu = cell.worker("c", split="1-4")
        cell.accept()
        assert len(cell.claim(cpu)) == 1

    def test_an_expired_job_ends_instead_of_running(self, cell: Cell) -> None:
        cell.worker("a", split="1-4")
        cell.accept(deadline_ms=1)
        assert cell.claim("a") == []
        end = cell.end()
        assert end.reason == "expired"
        assert cell.queued() == []

    def test_only_a_worker_of_the_first_stage_claims(self, cell: Cell) -> None:
        cell.worker("a", stage=0)
        last = cell.worker("b", stage=1)
        cell.accept()
        assert cell.claim(last) == []


class TestCommit:
    @pytest.fixture
    def run(self, cell: Cell):
        cell.worker("a", stage=0)
        cell.worker("b", stage=1)
        return cell.begin("a")

    def test_twice_is_once(self, cell: Cell, run: calls.Claimed) -> None:
        assert cell.commit(run, 0, [7, 8]) == cell.commit(run, 0, [7, 8]) == CommitAnswer("OK", 2)
        assert cell.log() == [TokenEntry(1, 7, numerics="n1"), TokenEntry(2, 8)]
        assert len(cell.inbox("a")) == 1

    def test_a_foreign_run_is_lost(self, cell: Cell, run: calls.Claimed) -> None:
        cell.rerun(run)
        assert cell.commit(run, 0, [7]).verdict == "LOST"
        (again,) = cell.claim("a")
        assert cell.commit(run, 0, [7]).verdict == "LOST" and cell.log() == []
        assert cell.commit(again, 0, [7]).verdict == "OK"

    def test_another_token_at_a_known_position_diverges_and_the_log_wins(self, cell: Cell, run: calls.Claimed) -> None:
        cell.commit(run, 0, [7])
        assert cell.commit(run, 0, [9]).verdict == "DIVERGED"
        assert cell.log() == [TokenEntry(1, 7, numerics="n1")]

    def test_a_hole_is_a_gap(self, cell: Cell, run: calls.Claimed) -> None:
        assert cell.commit(run, 2, [7]) == CommitAnswer("GAP", 0)
        assert cell.log() == []

    def test_past_the_deadline_the_request_expires(self, cell: Cell, run: calls.Claimed) -> None:
        cell.client.hset(cell.keys.request("req-1"), "deadline_ms", 1)
        assert cell.commit(run, 0, [7]).verdict == "EXPIRED"
        assert [type(e) for e in cell.log()] == [EndEntry]

    def test_a_bad_one_never_fails_its_neighbours(self, cell: Cell, run: calls.Claimed) -> None:
        second = cell.begin("a", request_id="req-2")
        items = [
            calls.Commit(request_id="req-1", run_id="stale", position=0, tokens=(1,)),
            calls.Commit(request_id="req-404", run_id="x", position=0, tokens=(1,)),
            calls.Commit(request_id="req-2", run_id=second.run_id, position=0, tokens=(1,), logprobs=('{"l":1}',)),
        ]
        assert [a.verdict for a in cell.scripts.run(calls.commit(items))] == ["LOST", "LOST", "OK"]
        assert cell.log("req-2") == [TokenEntry(1, 1, '{"l":1}', "n1")]

    def test_terminal_is_absorbing(self, cell: Cell, run: calls.Claimed) -> None:
        cell.commit(run, 0, [7], end="length")
        assert cell.commit(run, 1, [8]).verdict == "LOST"
        assert cell.scripts.run(calls.finish("req-1", "cancelled")) == "DONE"
        assert not cell.rerun(run) and cell.queued("reruns") == []

    def test_without_the_first_workers_inbox_the_request_runs_again(self, cell: Cell, run: calls.Claimed) -> None:
        cell.client.delete(cell.keys.inbox("a"))
        assert cell.commit(run, 0, [7]).verdict == "OK"
        assert cell.queued("reruns") == ["req-1"] and cell.record()["rerun_reason"] == "no_inbox"


class TestRerun:
    def test_only_the_current_run_and_only_once(self, cell: Cell) -> None:
        cell.worker("a", split="1-4")
        run = cell.begin("a")
        assert cell.rerun(run) and not cell.rerun(run)
        assert cell.queued("reruns") == ["req-1"] and cell.requests_of_worker("a") == set() and cell.reserved("a") == 0

    def test_the_second_one_for_missing_pages_makes_the_request_cold(self, cell: Cell) -> None:
        cell.worker("a", split="1-4")
        cell.accept()
        colds: list[bool] = []
        for _ in range(3):
            cell.client.zadd(cell.keys.delayed, {"req-1": 1}, xx=True)
            (run,) = cell.claim("a")
            colds.append(run.reusable == 0)
            cell.rerun(run, "missing_pages")
        assert colds == [False, False, True]

    def test_it_goes_on_after_what_was_committed(self, cell: Cell) -> None:
        cell.worker("a", split="1-4")
        run = cell.begin("a", [7, 8])
        cell.rerun(run)
        (again,) = cell.claim("a")
        assert again.tokens == (7, 8) and again.run_id != run.run_id


class TestFinish:
    def test_a_cancelled_queued_request_leaves_no_job(self, cell: Cell) -> None:
        cell.accept()
        assert cell.scripts.run(calls.finish("req-1", "cancelled", meta={"by": "client"})) == "FINISHED"
        assert cell.queued() == [] and cell.client.zcard(cell.keys.running) == 0
        assert isinstance(cell.log()[-1], EndEntry)

    def test_an_unknown_request(self, cell: Cell) -> None:
        assert cell.scripts.run(calls.finish("req-404", "cancelled")) == "UNKNOWN"

    def test_under_another_run_it_does_nothing(self, cell: Cell) -> None:
        cell.worker("a", split="1-4")
        cell.begin("a")
        assert cell.scripts.run(calls.finish("req-1", "error", run_id="stale")) == "LOST"
        assert cell.record()["state"] == "running"

    def test_no_clock_but_that_of_redis_ends_a_request_for_its_deadline(self, cell: Cell) -> None:
        cell.worker("a", split="1-4")
        cell.accept("req-1", deadline_ms=cell.now_ms() + 600_000)
        cell.accept("req-2")
        (run, _) = cell.claim("a")
        before = cell.everything()
        for call in (calls.finish("req-1", "expired"), calls.finish("req-1", "expired", run_id=run.run_id)):
            assert cell.scripts.run(call) == "EARLY", "the caller's clock may be an hour ahead"
        assert cell.scripts.run(calls.finish("req-2", "expired")) == "EARLY", "it has no deadline"
        assert cell.everything() == before
        cell.client.hset(cell.keys.request("req-1"), "deadline_ms", cell.now_ms() - 1)
        assert cell.scripts.run(calls.finish("req-1", "expired")) == "FINISHED"

    def test_everything_a_finished_request_leaves_expires(self, cell: Cell) -> None:
        cell.agree(retention_s=60)
        cell.worker("a", split="1-4")
        run = cell.begin("a")
        cell.commit(run, 0, [7], end="stop")
        for key in (cell.keys.request("req-1"), cell.keys.log("req-1")):
            assert 0 < cell.client.ttl(key) <= 60  # pyright: ignore[reportOperatorIssue]


class TestDead:
    def test_everything_on_a_dead_worker_runs_again_wherever_it_stood_in_the_route(self, cell: Cell) -> None:
        cell.worker("a", stage=0)
        last = cell.worker("b", stage=1)
        cell.begin("a")
        assert cell.scripts.run(calls.dead(last, silent_s=0)) == (True, 1)
        assert cell.queued("reruns") == ["req-1"] and cell.reserved("a") == 0
        assert not cell.client.exists(cell.keys.inbox(last), cell.keys.worker(last), cell.keys.worker_requests(last))
        assert cell.scripts.run(calls.dead(last, silent_s=0)) == (False, 0)

    def test_a_beating_worker_is_not_dead(self, cell: Cell) -> None:
        cell.worker("a", split="1-4")
        assert cell.scripts.run(calls.dead("a", silent_s=3)) == (False, 0)
        assert cell.scripts.run(calls.heartbeat("a")) == {}

    def test_a_dead_worker_that_wakes_up_learns_it(self, cell: Cell) -> None:
        cell.worker("a", split="1-4")
        cell.scripts.run(calls.dead("a", silent_s=0))
        assert cell.scripts.run(calls.heartbeat("a")) is None

    def test_a_vanished_gpu_hands_its_requests_to_the_cpu_and_says_so(self, cell: Cell) -> None:
        cell.scripts.run(calls.publish_plan(MODEL, replaces_epoch=0, inputs="i", route_class="gpu", plan="{}"))
        cell.worker("g", split="1-4", device="gpu")
        cell.worker("c", split="1-4")
        cell.begin("g")
        cell.scripts.run(calls.dead("g", silent_s=0))
        assert cell.queued("reruns", "cpu") == ["req-1"]
        assert '"reason":"worker_death"' in cell.record()["fallbacks"]


class TestPlan:
    def publish(self, cell: Cell, epoch: int, inputs: str) -> int:
        call = calls.publish_plan(MODEL, replaces_epoch=epoch, inputs=inputs, route_class="cpu", plan="{}")
        return cell.scripts.run(call)

    def test_two_schedulers_agree(self, cell: Cell) -> None:
        assert self.publish(cell, 0, "a") == 1
        assert self.publish(cell, 0, "b") == 1, "the slower one lost"
        assert self.publish(cell, 1, "a") == 1, "the same inputs change nothing"
        assert self.publish(cell, 1, "b") == 2


def test_scripts_survive_a_flushed_script_cache(cell: Cell) -> None:
    cell.accept("req-1")
    cell.client.script_flush()
    assert cell.accept("req-2").status == "OK"


def test_every_key_of_a_request_shares_the_hash_tag(cell: Cell) -> None:
    cell.worker("a", split="1-4")
    cell.begin("a", [7], content=body([4, 5]))
    assert all(k.startswith(b"{t}:") for k in cell.client.keys("*"))  # pyright: ignore
