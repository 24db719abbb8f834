"""Workers die, sleep, drain and fail in the middle of requests: the tokens stay those of the undisturbed run."""

import os
import signal

import pytest

from blockrelay.protocol.plan import missing_stages
from blockrelay.protocol.transitions import calls
from blockrelay.redis.registry import read_plan
from tests.support.systems.system import (
    Golden,
    StartSystem,
    System,
    assert_nothing_is_held,
    assert_undisturbed,
    make_jobs,
    serve,
    start_all,
)
from tests.support.waiting import wait_until


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_mixed_requests_give_the_tokens_of_their_solo_runs(start_system: StartSystem, stages: int) -> None:
    system = start_system(stages=stages)
    jobs = make_jobs(50, seed=stages, vocab=500, longest=200, tokens=24)
    serve(system, jobs)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_kill_9_of_each_stages_worker_changes_no_token(
    start_system: StartSystem, long_jobs: Golden, stage: int
) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=3)
    start_all(system, jobs)
    pid = system.pid_of(stage)
    os.kill(pid, signal.SIGKILL)
    next(w for w in system.workers if w.pid == pid).wait()
    system.start_worker()
    assert_undisturbed(system, jobs, golden)


def test_with_a_second_worker_per_stage_the_others_take_over(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=2, replicas=2)
    start_all(system, jobs)
    os.kill(system.pid_of(1), signal.SIGKILL)
    assert_undisturbed(system, jobs, golden)
    reruns = [int(system.client.hget(system.keys.request(j.request_id), "reruns") or 0) for j in jobs]  # pyright: ignore
    assert any(reruns) and not all(reruns), "only what was on the dead worker ran again"


def test_a_worker_that_slept_past_its_death_forgets_its_runs_and_comes_back(
    start_system: StartSystem, long_jobs: Golden
) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=2, replicas=2)
    start_all(system, jobs)
    pid = system.pid_of(0)
    before = {w.id for w in system.infos() if w.pid == pid}
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: before.isdisjoint(w.id for w in system.infos()), "the sleeper is declared dead")
    os.kill(pid, signal.SIGCONT)
    assert_undisturbed(system, jobs, golden)
    wait_until(lambda: any(w.pid == pid and w.ready for w in system.infos()), "it is back under a new id")


def test_a_drained_worker_hands_its_requests_over_and_exits_cleanly(
    start_system: StartSystem, long_jobs: Golden
) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=1, replicas=2)
    start_all(system, jobs)
    system.workers[0].terminate()
    assert system.workers[0].wait(5) == 0
    assert_undisturbed(system, jobs, golden)


def test_a_stage_without_a_live_worker_keeps_its_requests_waiting(start_system: StartSystem) -> None:
    system = start_system(stages=2)
    dead = system.pid_of(1)
    os.kill(dead, signal.SIGKILL)

    def gaps() -> list[str]:
        plan = read_plan(system.client, system.keys, system.model_key)
        return missing_stages(plan, system.infos())

    wait_until(gaps, "readiness names the gap")
    assert gaps() == ["stage 1 (block_4 to block_5) has no live worker"]
    jobs = make_jobs(3, seed=5, vocab=500)
    system.accept_all(jobs)
    assert not system.all_ended(jobs)
    system.start_worker()
    assert_undisturbed(system, jobs)


def test_a_stage_that_stays_empty_gets_a_worker_from_a_stage_that_can_spare_one(
    start_system: StartSystem, long_jobs: Golden
) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=2, scheduler_env={"BLOCKRELAY_VACANCY_S": "0.5"})
    system.start_worker()
    system.wait_ready(3)
    start_all(system, jobs)
    assert [w.stage for w in system.infos()].count(0) == 2
    os.kill(system.pid_of(1), signal.SIGKILL)
    assert_undisturbed(system, jobs, golden)


def test_a_failing_gpu_hands_over_to_the_cpu_in_mid_request(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=2)
    for _ in range(2):
        system.start_failing_gpu(after=40)
    system.wait_ready(4)
    wait_until(lambda: plan_class(system) == "gpu", "the plan has GPU stages")
    serve(system, jobs, golden)
    fallbacks = [event for job in jobs for event in (system.log(job.request_id)[1] or pytest.fail("no end")).fallbacks]
    assert fallbacks
    for event in fallbacks:
        assert event.block_id in ("block_1", "block_4")
        assert (event.source, event.target, event.reason, event.success) == ("GPU", "CPU", "gpu_driver_error", True)


def test_the_answer_tells_which_blocks_ran_on_a_gpu(start_system: StartSystem) -> None:
    system = start_system(stages=2)
    system.start_playing_gpu()
    system.wait_ready(3)
    wait_until(lambda: plan_class(system) == "gpu", "the plan has a GPU stage")
    (job,) = make_jobs(1, seed=17, vocab=500)
    system.accept(job)
    system.wait_all([job])
    end = system.log(job.request_id)[1]
    assert end is not None and end.meta["gpu_blocks"] == ["block_1", "block_2", "block_3"]
    assert list(end.meta["execution_times"]) == [f"block_{i}" for i in range(1, 6)]


def test_a_vanished_gpu_hands_over_to_the_cpu(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=1)
    gpu = system.start_playing_gpu()
    system.wait_ready(2)
    wait_until(lambda: plan_class(system) == "gpu", "the plan has a GPU stage")
    start_all(system, jobs)
    gpu.kill()
    assert_undisturbed(system, jobs, golden)
    reasons = {e.reason for job in jobs for e in (system.log(job.request_id)[1] or pytest.fail("no end")).fallbacks}
    assert reasons == {"worker_death"}


def test_a_cancelled_request_frees_its_pages_at_once(start_system: StartSystem) -> None:
    system = start_system(stages=2)
    (job,) = make_jobs(1, seed=9, vocab=500, tokens=400)
    system.accept(job)
    wait_until(lambda: system.tokens_so_far([job]) > 3, "it runs")
    assert system.scripts.run(calls.finish(job.request_id, "cancelled")) == "FINISHED"
    assert_nothing_is_held(system)
    tokens, end = system.log(job.request_id)
    assert end is not None and end.reason == "cancelled" and len(tokens) < 400


def test_prompts_longer_than_a_batch_arrive_in_chunks(start_system: StartSystem) -> None:
    system = start_system(stages=3, worker={"max_rows": "32"})
    jobs = make_jobs(8, seed=11, vocab=500, longest=300, tokens=16)
    serve(system, jobs)


def test_a_small_page_pool_lets_requests_wait_their_turn(start_system: StartSystem) -> None:
    bytes_per_page = 2 * 2 * 2 * 16 * 16 * 2 * 4  # far below what 12 requests need at once
    system = start_system(stages=2, worker={"kv_bytes": str(bytes_per_page * 8)})
    jobs = make_jobs(12, seed=13, vocab=500, longest=40, tokens=24)
    serve(system, jobs)


def plan_class(system: System) -> str | None:
    plan = read_plan(system.client, system.keys, system.model_key)
    return plan.route_class if plan else None
