"""Redis dies and comes back in the middle of requests; the other one too."""

import os
import signal

from blockrelay.protocol.keys import Keys
from tests.support.systems.system import Golden, StartSystem, assert_undisturbed, make_jobs, serve, start_all
from tests.support.waiting import wait_until


def test_a_killed_and_restarted_control_redis_loses_nothing(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=2)
    start_all(system, jobs)
    system.control.kill()
    system.control.start()
    assert_undisturbed(system, jobs, golden)


def test_a_killed_payload_redis_costs_time_and_no_token(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=3)
    start_all(system, jobs)
    system.payload.kill()
    system.payload.start()
    assert_undisturbed(system, jobs, golden)


def test_services_wait_for_a_redis_that_is_not_there_and_say_so(start_system: StartSystem) -> None:
    system = start_system(stages=1, scheduler=False)
    system.workers[0].kill()
    system.control.kill()
    system.start_scheduler()
    system.start_worker()
    worker_log, scheduler_log = system.folder / "worker-1.log", system.folder / "scheduler.log"
    for log, word in ((worker_log, "REDIS_TROUBLE"), (scheduler_log, "REDIS_TROUBLE")):
        wait_until(
            lambda log=log, word=word: log.exists() and word in log.read_text(), f"{log.name} says that it waits"
        )
    system.control.start()
    system.wait_ready(1)
    jobs = make_jobs(2, seed=21, vocab=500)
    serve(system, jobs)


def test_a_log_that_lost_its_tail_is_computed_again_to_the_same_tokens(
    start_system: StartSystem, long_jobs: Golden
) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=2)
    start_all(system, jobs)
    system.control.kill()
    system.control.truncate_aof(system.control.aof_size() - 2000)
    system.control.start()
    assert_undisturbed(system, jobs, golden)


def test_a_flushed_script_cache_is_no_event(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=2)
    start_all(system, jobs)
    system.client.script_flush()
    assert_undisturbed(system, jobs, golden)


def test_the_scheduler_may_be_away_while_requests_run(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=2)
    assert system.scheduler is not None
    os.kill(system.scheduler.pid, signal.SIGKILL)
    system.scheduler.wait()
    serve(system, jobs, golden)


def test_everything_that_finished_requests_leave_has_a_time_to_live(start_system: StartSystem) -> None:
    system = start_system(stages=2)
    jobs = make_jobs(5, seed=23, vocab=500)
    system.accept_all(jobs)
    system.wait_all(jobs)
    keys = Keys("t")
    lasting = {keys.workers, keys.running, keys.settings, keys.protocol, keys.plan(system.model_key)}
    for worker in system.infos():
        lasting |= {keys.worker(worker.id), keys.inbox(worker.id), keys.worker_requests(worker.id)}
    lasting |= {keys.outstanding(system.model_key), keys.totals(system.model_key), keys.plan_history(system.model_key)}
    for route_class in ("cpu", "gpu"):
        lasting |= {f(system.model_key, route_class) for f in (keys.jobs, keys.shares, keys.reruns)}
    for raw in system.client.keys("*"):  # pyright: ignore
        name = raw.decode()  # pyright: ignore
        assert name in lasting or system.client.pttl(name) != -1, name  # pyright: ignore
