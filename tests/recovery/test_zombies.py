"""Frozen for longer than anybody waits, then awake again: what a zombie does late must change nothing."""

import json
import os
import signal
import urllib.request

import pytest

from blockrelay_launcher.client.resuming import resuming_stream
from tests.support.systems.fault_stand import state_of
from tests.support.systems.system import Golden, StartSystem, assert_undisturbed, serve, start_all
from tests.support.waiting import wait_until

QUICK = {"BLOCKRELAY_DEAD_AFTER_S": "1"}


def test_the_late_commit_of_a_worker_that_was_declared_dead_is_refused(
    start_system: StartSystem, long_jobs: Golden
) -> None:
    jobs, golden = long_jobs
    # The other one may not take them all.
    system = start_system(stages=1, replicas=1, scheduler_env=QUICK, worker={"max_requests": "8"})
    sleeper = system.start_worker(failpoint="worker.before_commit:stop@20")
    system.wait_ready(2)
    start_all(system, jobs)
    wait_until(lambda: state_of(sleeper.pid) == "T", "it sleeps before a COMMIT")
    wait_until(lambda: all(w.pid != sleeper.pid for w in system.infos()), "the sleeper is declared dead")
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: system.refused_commits(sleeper.pid), "its COMMIT is refused")
    assert_undisturbed(system, jobs, golden)


def test_a_scheduler_that_slept_declares_nobody_dead_for_it(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=2, scheduler_env=QUICK)
    ids = {w.id for w in system.infos()}
    assert system.scheduler is not None
    os.kill(system.scheduler.pid, signal.SIGSTOP)
    sleeper = system.scheduler
    other = system.start_scheduler()
    start_all(system, jobs)
    system.wait_all(jobs)
    os.kill(sleeper.pid, signal.SIGCONT)
    assert system.results(jobs) == golden
    assert {w.id for w in system.infos()} == ids
    sleeper.terminate()
    assert sleeper.wait(10) == 0 and other.poll() is None


@pytest.mark.faults
def test_a_gateway_that_slept_sends_the_rest_exactly_once(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=1)
    url, gateway = system.start_gateway()
    job = jobs[0]
    body = {
        "prompt": list(job.prompt), "max_tokens": job.params.max_tokens, "temperature": job.params.temperature,
        "top_p": job.params.top_p, "seed": 11, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    with urllib.request.urlopen(_post(url, {**body, "stream": False})) as answer:
        undisturbed = json.load(answer)["choices"][0]["token_ids"]
    tokens: list[int] = []
    interruptions: list[str] = []
    for event in resuming_stream([url], "/v1/completions", body, retrying=interruptions.append):
        tokens += event.data["choices"][0].get("token_ids") or []
        if len(tokens) == 20:
            os.kill(gateway.pid, signal.SIGSTOP)
            wait_until(lambda: system.client.zcard(system.keys.running) == 0, "the workers are done without it")
            os.kill(gateway.pid, signal.SIGCONT)
    assert tokens == undisturbed and not interruptions
    assert golden


def _post(url: str, body: object) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)


def test_a_step_that_is_longer_than_the_lease_is_no_death(start_system: StartSystem, long_jobs: Golden) -> None:
    """Beats come from a thread of their own."""
    jobs, golden = long_jobs
    slow = {"failpoint": "worker.before_compute:delay=2.5@3"}
    system = start_system(stages=1, scheduler_env=QUICK, worker=slow)
    ids = {w.id for w in system.infos()}
    serve(system, jobs, golden)
    assert "FAILPOINT" in (system.folder / "worker-0.log").read_text()
    assert {w.id for w in system.infos()} == ids and system.reruns() == {}


@pytest.mark.faults
@pytest.mark.parametrize("which", ["control", "payload"])
def test_a_redis_that_slept_longer_than_the_lease_loses_nothing(
    start_system: StartSystem, long_jobs: Golden, which: str
) -> None:
    """Where beats go to, nobody is declared dead for it; where rows go to, whoever gets none is, and comes back."""
    jobs, golden = long_jobs
    system = start_system(stages=2, scheduler_env=QUICK)
    ids = {w.id for w in system.infos()}
    start_all(system, jobs)
    server = system.control if which == "control" else system.payload
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    if which == "control":  # calls end after five seconds
        wait_until(lambda: "REDIS_TROUBLE" in (system.folder / "scheduler.log").read_text(), "it is noticed")
    else:
        wait_until(lambda: ids.isdisjoint(w.id for w in system.infos()), "workers that get no rows are declared dead")
    os.kill(server.process.pid, signal.SIGCONT)
    assert_undisturbed(system, jobs, golden)
    if which == "control":
        assert {w.id for w in system.infos()} == ids
