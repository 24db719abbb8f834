"""Rows through shared memory between real workers: either side is killed in the middle, and nothing stays behind."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from blockrelay_worker.transport.local_rows.system import HAS_LOCAL_ROWS
from tests.support.systems.system import (
    Golden,
    StartSystem,
    System,
    assert_nothing_is_held,
    assert_undisturbed,
    start_all,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not HAS_LOCAL_ROWS, reason="rows go through Redis there")
FORWARDED = "blockrelay_worker_forwarded_bytes_total"
#: Longer than any test: nobody but the worker beside it can have noticed a death.
NO_SCHEDULER = {"BLOCKRELAY_DEAD_AFTER_S": "600"}


def shared_memory(system: System) -> set[Path]:
    """Files in /dev/shm that its workers have mapped or open, still there or not. What others have there, servers and
    tests beside this one, comes and goes as they like."""
    found: set[str] = set()
    for worker in system.workers:
        with suppress(OSError):  # it has ended
            maps = Path(f"/proc/{worker.pid}/maps").read_text().splitlines()
            found |= {line.split(maxsplit=5)[5] for line in maps if " /dev/shm/" in line}
            for file in Path(f"/proc/{worker.pid}/fd").iterdir():
                with suppress(OSError):
                    found.add(os.readlink(file))
    return {Path(name.removesuffix(" (deleted)")) for name in found if name.startswith("/dev/shm/")}


def all_listening() -> dict[str, str]:
    """Names of sockets of workers in the abstract namespace, of all systems of this machine, by inode."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@blockrelay/" in line]
    return {line[6]: line[7] for line in lines}


def listening(system: System) -> set[str]:
    """Names of those that workers of the system have open."""
    found, names = set[str](), all_listening()
    for worker in system.workers:
        with suppress(OSError):  # it has ended
            for file in Path(f"/proc/{worker.pid}/fd").iterdir():
                with suppress(OSError):
                    found.add(names.get(os.readlink(file).removeprefix("socket:[").removesuffix("]"), ""))
    return found - {""}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_kill_9_of_either_side_is_noticed_by_its_neighbour_and_leaves_nothing(
    start_system: StartSystem, long_jobs: Golden, stage: int
) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=3, replicas=2, scheduler_env=NO_SCHEDULER)
    start_all(system, jobs)
    assert system.metric(FORWARDED) > 0
    sockets = listening(system)
    assert len(sockets) == 6, "one of each worker"
    memory = shared_memory(system)
    pid = max((w for w in system.infos() if w.stage == stage), key=lambda w: w.running).pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in {w.pid for w in system.infos()}, "it is declared dead")
    assert len(sockets & set(all_listening().values())) == 5
    assert_undisturbed(system, jobs, golden)
    reruns = system.reruns()
    assert reruns["death"] and "no_inbox" not in reruns, (
        "the cell heard of the death before rows were found undelivered"
    )
    assert_nothing_is_held(system)
    system.stop()
    assert not sockets & set(all_listening().values())
    assert not {file for file in memory if file.exists()}


def test_workers_with_and_without_it_serve_one_pipeline(start_system: StartSystem, long_jobs: Golden) -> None:
    jobs, golden = long_jobs
    system = start_system(stages=2, worker={"local_rows": "off"})
    start_all(system, jobs)
    assert not listening(system)
    system.start_worker()
    system.start_worker()
    for old in system.workers[:2]:
        old.terminate()
    assert_undisturbed(system, jobs, golden)
    assert len(listening(system)) == 2


def test_a_payload_redis_that_goes_away_stops_no_rows_of_one_host(start_system: StartSystem, long_jobs: Golden) -> None:
    """Workers say that they live only where rows reach them; until then what runs goes on."""
    jobs, golden = long_jobs
    system = start_system(stages=2, scheduler_env=NO_SCHEDULER)
    start_all(system, jobs)
    system.payload.kill()
    before = system.tokens_so_far(jobs)
    wait_until(lambda: system.tokens_so_far(jobs) > before + 20 * len(jobs), "tokens go on without it")
    system.payload.start()
    assert_undisturbed(system, jobs, golden)
