"""Rows through shared memory between real workers: either side is killed in the middle, and nothing stays behind."""

import os
import signal
from pathlib import Path

import pytest

from blockrelay_worker.transport.local_rows.system import HAS_LOCAL_ROWS
from tests.support.systems.system import Golden, StartSystem, assert_nothing_is_held, start_all
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not HAS_LOCAL_ROWS, reason="rows go through Redis there")
FORWARDED = "blockrelay_worker_forwarded_bytes_total"
#: Longer than any test: nobody but the worker beside it can have noticed a death.
NO_SCHEDULER = {"BLOCKRELAY_DEAD_AFTER_S": "600"}


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def listening() -> set[str]:
    """Names of sockets of ours in the abstract namespace."""
    return {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@blockrelay/" in line}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_kill_9_of_either_side_is_noticed_by_its_neighbour_and_leaves_nothing(
    start_system: StartSystem, long_jobs: Golden, stage: int
) -> None:
    jobs, golden = long_jobs
    memory, sockets = shared_memory(), listening()
    system = start_system(stages=3, replicas=2, scheduler_env=NO_SCHEDULER)
    start_all(system, jobs)
    assert system.metric(FORWARDED) > 0
    assert len(listening() - sockets) == 6, "one of each worker"
    pid = max((w for w in system.infos() if w.stage == stage), key=lambda w: w.running).pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in {w.pid for w in system.infos()}, "it is declared dead")
    assert len(listening() - sockets) == 5
    system.wait_all(jobs)
    assert system.results(jobs) == golden
    reruns = system.reruns()
    assert reruns["death"] and "no_inbox" not in reruns, (
        "the cell heard of the death before rows were found undelivered"
    )
    assert_nothing_is_held(system)
    system.stop()
    assert listening() == sockets and shared_memory() == memory


def test_workers_with_and_without_it_serve_one_pipeline(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    sockets = listening()
    system = start_system(stages=2, worker={"local_rows": "off"})
    start_all(system, jobs)
    assert listening() == sockets
    system.start_worker()
    system.start_worker()
    for old in system.workers[:2]:
        old.terminate()
    system.wait_all(jobs)
    assert system.results(jobs) == golden
    assert len(listening() - sockets) == 2


def test_a_payload_redis_that_goes_away_stops_no_rows_of_one_host(start_system: StartSystem, long_jobs: Golden) -> None:
    """Workers say that they live only where rows reach them; until then what runs goes on."""
    jobs, golden = long_jobs
    system = start_system(stages=2, scheduler_env=NO_SCHEDULER)
    start_all(system, jobs)
    system.payload.kill()
    before = system.tokens_so_far(jobs)
    wait_until(lambda: system.tokens_so_far(jobs) > before + 20 * len(jobs), "tokens go on without it")
    system.payload.start()
    system.wait_all(jobs)
    assert system.results(jobs) == golden
