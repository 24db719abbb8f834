"""A service one of whose threads or tasks has ended unexpectedly ends as a whole, with the code that says: start me
again."""

from contextlib import suppress
from typing import cast

import httpx

from blockrelay.exit_codes import BROKEN
from tests.support.redis.redis_proxy import proxied
from tests.support.systems.system import Golden, StartSystem, assert_undisturbed, start_all
from tests.support.waiting import wait_until


def test_a_worker_whose_beat_meets_what_nobody_expects(start_system: StartSystem, long_jobs: Golden) -> None:
    """A plan of another type than any of ours: of the threads of a worker that serves, only this one reads it."""
    jobs, golden = long_jobs
    system = start_system()
    (worker,) = system.workers
    start_all(system, jobs)
    assert system.scheduler is not None
    system.scheduler.kill()
    system.scheduler.wait()
    plan = system.keys.plan(system.model_key)
    system.client.set(plan, "not a plan")
    assert worker.wait(30) == BROKEN
    assert "WRONGTYPE" in (system.folder / "worker-0.log").read_text()
    system.client.delete(plan)
    system.start_scheduler()
    system.start_worker()
    assert_undisturbed(system, jobs, golden)


def test_a_scheduler_whose_sweeper_meets_what_nobody_expects(start_system: StartSystem, long_jobs: Golden) -> None:
    """A payload Redis that does not know how to delete: the rows of the dead would stay, and nobody would say so."""
    jobs, golden = long_jobs
    system = start_system(stages=2, scheduler=False)
    with proxied(system.payload) as payload:
        scheduler = system.start_scheduler(payload_redis_url=payload.url)
        system.wait_ready(2)
        start_all(system, jobs)
        payload.answer(b"-ERR unknown command 'DEL'\r\n")
        victim = system.workers[1]
        victim.kill()
        assert scheduler.wait(30) == BROKEN
    assert "unknown command 'DEL'" in (system.folder / "scheduler.log").read_text()
    system.start_scheduler()
    system.start_worker()
    assert_undisturbed(system, jobs, golden)


def test_a_gateway_whose_tailer_meets_what_nobody_expects(start_system: StartSystem) -> None:
    """Its stream is of another type: without the tailer every answer would take seconds, and it would look ready."""
    system = start_system()
    url, gateway = system.start_gateway()
    wake = f"{system.keys.wake('')}*"

    def disturb() -> bool:
        """A request makes the gateway write to its stream, and so tells its name."""
        httpx.post(f"{url}/v1/completions", json={"prompt": [5], "max_tokens": 2}, timeout=30)
        names = cast("list[bytes]", system.client.keys(wake))
        for name in names:
            system.client.delete(name)
            system.client.set(name, "not a stream")
        return bool(names)

    wait_until(disturb, "the gateway has a stream")
    wait_until(lambda: gateway.poll() is not None or _asks(url), "it has read it")
    assert gateway.wait(30) == BROKEN
    assert "BACKGROUND_WORK_FAILED" in (system.folder / "gateway-0.log").read_text()


def _asks(url: str) -> bool:
    """One more request, so that there is something to read."""
    with suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json={"prompt": [5], "max_tokens": 2}, timeout=30)
    return False
