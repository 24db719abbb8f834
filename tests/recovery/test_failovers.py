"""The control Redis fails over in the middle of streams: nobody exits, and every answer is that of a solo run."""

import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import redis

from blockrelay.errors import RedisUnavailable
from blockrelay_launcher.client.resuming import resuming_stream
from tests.support.redis.failover import Arrangement, Cluster, WithSentinels, arranged
from tests.support.redis.redis_server import RedisServer
from tests.support.systems.system import Job, System, assert_nothing_is_held, golden_tokens, make_jobs
from tests.support.waiting import wait_until

CLIENTS, TOKENS, SEED = 6, 120, 11


class OfArrangement(RedisServer):
    """What `System` wants to know of a control Redis."""

    def __init__(self, servers: Arrangement) -> None:
        self._servers, self.url = servers, servers.url()

    def client(self) -> redis.Redis:
        return self._servers.client()


@contextmanager
def running(kind: type[WithSentinels] | type[Cluster], model: Path) -> Iterator[tuple[System, Arrangement, str]]:
    """A gateway, a scheduler, two stages of two workers; in a cluster rows go over it too. The URL of the gateway."""
    with tempfile.TemporaryDirectory(prefix="br-fail-") as place, ExitStack() as stack:
        folder = Path(place)
        servers = stack.enter_context(arranged(kind, folder / "redis", cell="t"))
        control = payload = OfArrangement(servers)
        if kind is WithSentinels:
            payload = RedisServer(folder / "p", durable=False).start()
            stack.callback(payload.stop)
        system = System(folder=folder, model=model, control=control, payload=payload, stages=2)
        stack.callback(system.stop)
        system.start_scheduler()
        for _ in range(4):
            system.start_worker()
        url, _ = system.start_gateway()
        system.wait_ready(4)
        yield system, servers, url


def services(system: System) -> dict[str, "subprocess.Popen[bytes]"]:
    kinds = {"gateway": system.gateways, "scheduler": system.schedulers, "worker": system.workers}
    return {f"{name}-{number}": one for name, many in kinds.items() for number, one in enumerate(many)}


def answers(system: System) -> bool:
    with suppress(RedisUnavailable):
        return bool(system.client.exists(system.keys.workers))
    return False


@dataclass
class Clients:
    """Ask for one job after the other until `enough` is set; what they got, and when the tokens came."""

    url: str
    jobs: list[Job]
    enough: threading.Event = field(default_factory=threading.Event)
    answers: list[tuple[str, list[int], str]] = field(default_factory=list[tuple[str, list[int], str]])
    times: list[list[float]] = field(default_factory=list[list[float]])

    def run(self, number: int) -> None:
        turn = number
        times: list[float] = []
        self.times.append(times)
        while not self.enough.is_set():
            job = self.jobs[turn % len(self.jobs)]
            turn += CLIENTS
            tokens, end = list[int](), ""
            for event in resuming_stream([self.url], "/v1/completions", self._body(job), patience_s=100):
                if "error" in event.data:
                    end = str(event.data)
                    continue
                (choice,) = event.data["choices"]
                tokens += choice["token_ids"]
                end = choice["finish_reason"] or end
                times.append(time.monotonic())
            self.answers.append((job.request_id, tokens, end))

    def _body(self, job: Job) -> dict[str, object]:
        params = job.params.to_dict()
        asked = {name: params[name] for name in ("max_tokens", "temperature", "top_p", "ignore_eos") if name in params}
        return {**asked, "prompt": list(job.prompt), "seed": SEED, "return_token_ids": True, "stream": True}

    def tokens_since(self, moment: float) -> list[int]:
        """Of each client."""
        return [sum(when > moment for when in times) for times in self.times]

    def longest_pause(self, since: float) -> float:
        """Seconds between two tokens of one client, the second of which came after `since`."""
        gaps = [b - a for times in self.times for a, b in pairwise(times) if b > since]
        return max(gaps)


FAILOVERS: dict[str, Callable[[Arrangement], object]] = {
    "planned": lambda servers: servers.fail_over(),
    "killed": lambda servers: servers.kill_master(),
}


@pytest.mark.failovers
@pytest.mark.timeout(300)
@pytest.mark.parametrize("failover", FAILOVERS)
@pytest.mark.parametrize("kind", [WithSentinels, Cluster], ids=["sentinels", "cluster"])
def test_streams_outlive_a_failover(
    kind: type[WithSentinels] | type[Cluster], failover: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(kind, tiny_model) as (system, servers, url):
        jobs = make_jobs(12, seed=5, vocab=500, tokens=TOKENS)
        golden = golden_tokens(system.block_folder, jobs, seed=SEED)
        clients = Clients(url, jobs)
        with ThreadPoolExecutor(CLIENTS) as pool:
            work = [pool.submit(clients.run, number) for number in range(CLIENTS)]
            try:
                begun = time.monotonic()
                wait_until(
                    lambda: len(clients.times) == CLIENTS and min(clients.tokens_since(begun)) > 5, "they stream"
                )
                began = time.monotonic()
                FAILOVERS[failover](servers)
                over = time.monotonic()
                wait_until(
                    lambda: all(one.done() for one in work) or min(clients.tokens_since(over)) > TOKENS,
                    "every client gets another answer",
                    timeout_s=120,
                )
            finally:
                clients.enough.set()
            for one in work:
                one.result()
        ended = {name: process.returncode for name, process in services(system).items() if process.poll() is not None}
        assert not ended, "services that exited"
        for request_id, tokens, end in clients.answers:
            assert tokens == golden[request_id] and end in ("length", "stop"), (request_id, end)
        wait_until(lambda: answers(system), "the test's own client has found the new master")
        assert_nothing_is_held(system)
        with capsys.disabled():
            print(  # noqa: T201
                f"\n{kind.__name__}, {failover}: {len(clients.answers)} answers, a new master after"
                f" {over - began:.1f} s, longest pause of a stream {clients.longest_pause(began):.1f} s"
            )
