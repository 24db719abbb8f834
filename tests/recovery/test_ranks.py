"""Ranks of a worker die, hang and come back in the middle of requests: the tokens stay those of one process."""

import os
import signal
from pathlib import Path

from blockrelay.host.child_command import module_command, run_command
from tests.support.systems.system import Golden, StartSystem, System, assert_undisturbed, serve, start_all
from tests.support.waiting import wait_until


def start_ranked(start_system: StartSystem, *, workers: int, **env: str) -> System:
    """One stage whose workers have a rank beside themselves."""
    return start_system(stages=1, replicas=workers, worker={"tensor_parallel": "2", **env})


def ranks_of(system: System) -> list[int]:
    """The ranks of all workers: their child processes."""
    found: list[int] = []
    for worker in system.workers:
        for task in Path(f"/proc/{worker.pid}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def test_ranks_give_the_tokens_of_one_process_and_share_pages_with_one(
    start_system: StartSystem, long_jobs: Golden
) -> None:
    jobs, golden = long_jobs
    system = start_ranked(start_system, workers=1)
    system.start_worker()
    system.wait_ready(2)
    serve(system, jobs, golden)


def test_a_killed_rank_costs_no_token_and_its_worker_loads_the_stage_again(
    start_system: StartSystem, long_jobs: Golden
) -> None:
    jobs, golden = long_jobs
    system = start_ranked(start_system, workers=2)
    before = {worker.id for worker in system.infos()}
    start_all(system, jobs)
    (first, second) = ranks_of(system)
    os.kill(first, signal.SIGKILL)
    assert_undisturbed(system, jobs, golden)
    wait_until(lambda: len(ranks_of(system)) == 2 and first not in ranks_of(system), "there is another rank")
    wait_until(lambda: len({w.id for w in system.infos() if w.ready} - before) == 1, "the worker is back")
    assert second in ranks_of(system) and all(worker.poll() is None for worker in system.workers)
    assert system.metric("blockrelay_worker_device_losses_total", reason="rank_ended") == 1


def test_a_rank_that_dies_while_nothing_is_computed_is_replaced(start_system: StartSystem, long_jobs: Golden) -> None:
    system = start_ranked(start_system, workers=1)
    (before,) = ranks_of(system)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: [pid for pid in ranks_of(system) if pid != before], "there is another rank")
    (loading,) = ranks_of(system)
    os.kill(loading, signal.SIGKILL)
    wait_until(lambda: [pid for pid in ranks_of(system) if pid not in (before, loading)], "there is a third one")
    jobs, golden = long_jobs
    serve(system, jobs[:4], {job.request_id: golden[job.request_id] for job in jobs[:4]})
    assert system.metric("blockrelay_worker_device_losses_total", reason="rank_ended") == 2


def test_a_rank_that_hangs_ends_its_worker_within_the_step_limit_and_nothing_is_lost(
    start_system: StartSystem, long_jobs: Golden
) -> None:
    jobs, golden = long_jobs
    system = start_ranked(start_system, workers=1, session_timeout_s="2")
    start_all(system, jobs[:6])
    (rank,) = ranks_of(system)
    os.kill(rank, signal.SIGSTOP)
    assert system.workers[0].wait(30) != 0, "the worker ends a step that takes too long"
    wait_until(lambda: not Path(f"/proc/{rank}").exists(), "its rank has ended with it")
    system.start_worker(tensor_parallel="2")
    assert_undisturbed(system, jobs[:6], {job.request_id: golden[job.request_id] for job in jobs[:6]})


def test_a_killed_worker_takes_its_ranks_with_it(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_ranked(start_system, workers=1)
    start_all(system, jobs[:6])
    (rank,) = ranks_of(system)
    system.workers[0].kill()
    wait_until(lambda: not Path(f"/proc/{rank}").exists(), "its rank has ended with it")
    system.start_worker(tensor_parallel="2")
    assert_undisturbed(system, jobs[:6], {job.request_id: golden[job.request_id] for job in jobs[:6]})


def test_settings_that_ranks_cannot_have_end_a_worker_with_one_line(tiny_model: Path) -> None:
    for options, message in (
        (("--tensor-parallel", "0"), "greater than or equal to 1"),
        (("--tensor-parallel", "16"), "tensor_parallel 16: there are"),
        (("--tensor-parallel", "2", "--gpu", "cpu"), "tensor_parallel is for workers on CPUs"),
    ):
        done = run_command(module_command("blockrelay_worker", "--model", tiny_model, *options))
        assert done.code == 2 and message in done.last_line, done.last_line
