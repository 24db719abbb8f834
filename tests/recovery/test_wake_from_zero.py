"""A system asleep: no worker, until an autoscaler sees that something is unfinished, and none when all is answered."""

import math
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import redis

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.encoding.request_ids import own_id
from tests.support.redis.keda import keda, unfinished
from tests.support.systems.system import Job, StartSystem, System, golden_tokens, make_jobs
from tests.support.waiting import wait_until

#: As in deploy/k8s/components/keda, with its times shortened.
PER_WORKER, MOST = 10, 4
COOLDOWN_S, STABILISATION_S, PERIOD_S = 2.0, 1.0, 0.3
SEED = 5
#: Of a worker: slower than it could be, so that some go while others still have something to do.
SPEED = "0.1"


@pytest.fixture(scope="module")
def burst(tiny_model: Path) -> tuple[list[Job], dict[str, list[int]]]:
    """40 requests, of which 8 last longer, and their tokens when each runs alone."""
    jobs = [*make_jobs(32, seed=11, vocab=500, tokens=40), *make_jobs(8, seed=12, vocab=500, tokens=400)]
    return jobs, golden_tokens(open_block_folder(tiny_model), jobs, seed=SEED)


@dataclass
class Autoscaler:
    """Sets the number of workers by what KEDA's trigger sees, as KEDA does (from none, to none) and its autoscaler.

    `history`: what it saw and how many workers it left, at every look.
    """

    system: System
    client: redis.Redis
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    leaving: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    history: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    ended_before_the_rest: int = 0
    _wanted: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    _active: float = -math.inf
    _ended: float = -math.inf

    def look(self) -> None:
        now, seen = time.monotonic(), unfinished(self.client, self.system.keys)
        self._active = now if seen else self._active
        self._wanted.append((now, min(MOST, math.ceil(seen / PER_WORKER))))
        while self._wanted[0][0] < now - STABILISATION_S:
            self._wanted.popleft()
        wanted = self._wanted[-1][1]
        while len(self.workers) < wanted:
            self.workers.append(self.system.start_worker(max_requests=str(PER_WORKER), inject_speed=SPEED))
        asleep = seen == 0 and now - self._active > COOLDOWN_S
        least = 0 if asleep else 1
        highest = max(count for _, count in self._wanted)
        if len(self.workers) > max(highest, least) and now - self._ended > PERIOD_S:
            self._end_one(seen)
            self._ended = now
        assert all(process.poll() is None for process in self.workers), "no worker ends by itself"
        self.history.append((seen, len(self.workers)))

    def _end_one(self, seen: int) -> None:
        """The newest, as Kubernetes does where all are alike."""
        one = self.workers.pop()
        if seen:
            assert self.workers, "somebody carries what is unfinished"
            self.ended_before_the_rest += 1
        one.send_signal(signal.SIGTERM)
        self.leaving.append(one)


@pytest.fixture
def system(start_system: StartSystem) -> System:
    asleep = start_system(replicas=0, scheduler=False)
    asleep.start_scheduler()
    return asleep


@pytest.fixture
def autoscaler(system: System) -> Iterator[Autoscaler]:
    client = keda(system.client, system.keys)
    yield Autoscaler(system, client)
    client.close()


def ask(gateway: str, job: Job) -> str:
    """Its id, when it is accepted."""
    body = {"model": "tiny", "prompt": list(job.prompt), "background": True, "seed": SEED, "ignore_eos": True}
    answer = httpx.post(f"{gateway}/v1/completions", json=job.params.to_dict() | body, timeout=30)
    assert answer.status_code == 202, answer.text
    return own_id(answer.headers["x-request-id"])


def test_a_burst_wakes_workers_and_none_is_left_when_all_is_answered(
    system: System, autoscaler: Autoscaler, burst: tuple[list[Job], dict[str, list[int]]]
) -> None:
    jobs, golden = burst
    gateway, _ = system.start_gateway()
    accepting = f"{gateway}/readyz?for=accepting"
    wait_until(lambda: httpx.get(accepting).status_code == 200, "requests are accepted without a worker")
    assert httpx.get(f"{gateway}/readyz").status_code == 503, "no token can be produced"
    autoscaler.look()
    assert autoscaler.history == [(0, 0)], "nothing to do, nobody there"

    ids = {job.request_id: ask(gateway, job) for job in jobs}
    autoscaler.look()
    assert autoscaler.history[-1] == (40, MOST)

    def settled() -> bool:
        autoscaler.look()
        return autoscaler.history[-1] == (0, 0)

    wait_until(settled, "everything is answered and the workers are gone", timeout_s=120, poll_s=0.05)
    for job in jobs:
        tokens, end = system.log(ids[job.request_id])
        assert end is not None and end.reason == "length"
        assert tokens == golden[job.request_id]
    assert all(count for seen, count in autoscaler.history if seen), "never nobody while something was unfinished"
    assert autoscaler.ended_before_the_rest, "workers were ended while others went on"
    for process in autoscaler.leaving:
        assert process.wait(20) == 0

    wait_until(lambda: httpx.get(accepting).status_code == 200, "requests are accepted while it sleeps again")
    again = ask(gateway, jobs[0])
    wait_until(settled, "it woke and sleeps again", timeout_s=60, poll_s=0.05)
    assert system.log(again)[0] == golden[jobs[0].request_id]
    assert max(count for _, count in autoscaler.history[-20:]) <= 1
