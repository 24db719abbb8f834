"""Causes of trouble, done to real systems beside a real Prometheus.

Each is a context manager: the trouble is there inside, and mended behind. Panels and alerts are asked meanwhile.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from blockrelay.auth.api_keys import Tenant, add_key
from blockrelay.redis.registry import read_plan
from blockrelay_launcher.drill.system import children_of
from blockrelay_launcher.supervisor.ports import kept_ports
from blockrelay_worker.policy import MAX_LOSSES
from tests.support.prometheus import Prometheus, running_exporter, running_prometheus, through_exporter
from tests.support.systems.device_processes import child_of
from tests.support.systems.system import StartSystem, System, make_jobs
from tests.support.waiting import wait_until

#: A token that the poisonous request has and no other.
POISON = 77
#: Of the tiny model.
PAGE_BYTES = 2 * 4 * 2 * 16 * 16 * 2
STORE = {"page_store_redis_bytes": str(64 << 20)}


@dataclass
class Watched:
    """A system of two stages with a gateway, Prometheus beside it, and an API key of each kind.

    `start` starts other systems, of the same cell name. `here` is the system where a cause is: what commands look at.
    """

    system: System
    prometheus: Prometheus
    url: str
    operator: str
    tenant: str
    start: StartSystem
    here: System
    gateway: dict[str, str]  # its settings
    client: httpx.Client  # one for all: to make one takes longer than a request

    def ask(self, prompt: list[int], *, tokens: int = 40, key: str = "", **more: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}
        headers = {"authorization": f"Bearer {key or self.operator}"}
        return self.client.post(f"{self.url}/v1/completions", json=body, headers=headers)

    def ask_many(self, count: int, **how: Any) -> list[int]:
        """Statuses of so many different requests at once."""
        jobs = make_jobs(count, seed=count, vocab=POISON, longest=40)
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda job: self.ask(list(job.prompt), **how).status_code, jobs))

    def start_gateway(self) -> None:
        """Another gateway instead of the one that there was."""
        self.url, _ = self.system.start_gateway(**self.gateway)
        for job in ("blockrelay-gateway", "blockrelay-tenants"):
            self.prometheus.forget(job)
            self.prometheus.add(job, self.url.removeprefix("http://"))

    def start_scheduler(self) -> None:
        """Another scheduler instead of the one that there was."""
        before = ports_of_schedulers(self.system)
        self.system.start_scheduler()
        wait_until(lambda: len(ports_of_schedulers(self.system)) > len(before), "the scheduler is ready")
        self.prometheus.add("blockrelay-scheduler", f"127.0.0.1:{ports_of_schedulers(self.system)[-1]}")

    def watch(self, system: System, *, scheduler: bool = True) -> None:
        """Scrape the workers of a system, and its scheduler."""
        live = [worker for worker in system.infos() if worker.state == "ready"]
        self.prometheus.add("blockrelay-worker", *(f"127.0.0.1:{worker.port}" for worker in live))
        if scheduler:
            self.prometheus.add("blockrelay-scheduler", f"127.0.0.1:{ports_of_schedulers(system)[-1]}")

    def seen(self, expr: str) -> bool:
        """Whether Prometheus has it now."""
        return bool(self.prometheus.values(expr, time.time() - 3))

    @contextmanager
    def another(self, **how: Any) -> Iterator[System]:
        """Another system, watched, where the commands look meanwhile. It ends with the test."""
        self.here = self.start(stages=1, **how)
        self.watch(self.here)
        try:
            yield self.here
        finally:
            self.here = self.system


Cause = Callable[[Watched], AbstractContextManager[None]]


@contextmanager
def watched_system(start: StartSystem, folder: Path, **prometheus: object) -> Iterator[Watched]:
    """`prometheus`: more of its configuration."""
    # A key without a limit of its own would have a share of what may be in flight, and never fill it.
    operator = add_key(keys := folder / "keys.json", Tenant(name="chief", operator=True, concurrency=100))
    tenant = add_key(keys, Tenant(name="ada", tokens_per_minute=200))
    # A stage that a cause empties stays empty, however long a slow machine asks for its alerts.
    system = start(stages=2, replicas=2, worker=STORE, scheduler_env={"BLOCKRELAY_VACANCY_S": "300"})
    gateway = {"api_keys": str(keys), "max_in_flight": "24", "grace_s": "0.2"}
    (folder / "operator-key").write_text(operator)
    secret = {"authorization": {"credentials_file": str(folder / "operator-key")}}
    jobs: dict[str, dict[str, Any]] = {
        "blockrelay-gateway": {},
        "blockrelay-scheduler": {},
        "blockrelay-worker": {},
        "blockrelay-tenants": {"metrics_path": "/metrics/tenants", **secret},
    }
    with ExitStack() as stack:
        (port, exporter) = stack.enter_context(kept_ports("127.0.0.1", 0, 2))
        stack.enter_context(running_exporter(exporter))
        jobs["blockrelay-redis"] = through_exporter(exporter)
        beside = stack.enter_context(running_prometheus(folder / "prometheus", port, jobs, **prometheus))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        client = stack.enter_context(httpx.Client(timeout=120, limits=limits))
        found = Watched(system, beside, "", operator, tenant, start, system, gateway, client)
        found.watch(system)
        found.start_gateway()
        beside.add("blockrelay-redis", system.control.url, system.payload.url)
        yield found


def ports_of_schedulers(system: System) -> list[int]:
    """Of all that were ready, the newest last."""
    log = (system.folder / "scheduler.log").read_text()
    return [int(port) for port in re.findall(r'"NODE_READY".*"port": (\d+)', log)]


@contextmanager
def load(on: Watched) -> Iterator[None]:
    """Long enough that workers have measured themselves, and schedulers and Prometheus have looked."""
    for count in (10, 11, 12):
        assert on.ask_many(count, tokens=300) == [200] * count
    yield


@contextmanager
def prefixes(on: Watched) -> Iterator[None]:
    """A long beginning that all share, and that says the same again and again."""
    beginning = [5, 6, 7, 8, 9, 10, 11, 12] * 12
    for index in range(6):
        assert on.ask([*beginning, 20 + index], tokens=60, temperature=0).status_code == 200
    yield


@contextmanager
def tenants(on: Watched) -> Iterator[None]:
    """One of them beyond its limit."""
    statuses = [on.ask([index + 3] * 10, tokens=40, key=on.tenant).status_code for index in range(8)]
    assert set(statuses) == {200, 429}
    yield


@contextmanager
def overload(on: Watched) -> Iterator[None]:
    """More requests than may be in flight, and a client that leaves."""
    statuses = list[int]()
    workers = [process for process in on.system.workers if process.poll() is None]
    with ThreadPoolExecutor(60) as pool:
        for worker in workers:  # a fast machine would be done with one before the next comes
            worker.send_signal(signal.SIGSTOP)
        try:
            for job in make_jobs(60, seed=60, vocab=POISON, longest=40):
                asked = pool.submit(on.ask, list(job.prompt), tokens=300)
                asked.add_done_callback(lambda answer: statuses.append(answer.result().status_code))
            wait_until(lambda: 503 in statuses, "more ask at once than may be in flight")
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGCONT)
    assert set(statuses) == {200, 503}
    headers = {"authorization": f"Bearer {on.operator}"}
    body = {"prompt": [5], "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{on.url}/v1/completions", json=body, headers=headers) as leaving:
        next(leaving.iter_lines())
    yield


@contextmanager
def crowd(on: Watched) -> Iterator[None]:
    """A worker of the whole model with far too few KV pages."""
    with on.another(worker={"kv_bytes": str(12 * PAGE_BYTES), "inject_speed": "0.3"}) as narrow:
        jobs = make_jobs(20, seed=21, vocab=500, longest=60, tokens=70)
        for job in jobs:
            narrow.accept(job)
        yield
        narrow.wait_all(jobs)


@contextmanager
def kill(on: Watched) -> Iterator[None]:
    """-9 for all workers of a stage, in the middle of requests; new ones behind."""
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(on.ask_many, 8, tokens=300)
        wait_until(lambda: on.system.client.zcard(on.system.keys.running) == 8, "they run")
        dying = set[int]()

        def vacant() -> bool:
            """Whoever registers anew, after a Redis that was away, may take the stage behind our back."""
            stages = {worker.pid: worker.stage for worker in on.system.infos()}
            for process in on.system.workers:
                if process.poll() is None and stages.get(process.pid) == 1:
                    process.kill()
                    process.wait()
                    dying.add(process.pid)
            return all(stages.get(process.pid) == 0 for process in on.system.workers if process.poll() is None)

        wait_until(vacant, "nobody is left of the last stage")
        yield
        for _ in dying:
            on.system.start_worker(**STORE)
        on.system.wait_ready(4)
        assert answers.result() == [200] * 8
    on.watch(on.system, scheduler=False)


@contextmanager
def gpu(on: Watched) -> Iterator[None]:
    """The GPUs' workers fail in the middle of requests, which go on on CPUs."""
    for _ in range(2):
        on.system.start_failing_gpu(after=3)
    wait_until(lambda: len([w for w in on.system.infos() if w.device == "gpu" and w.ready]) == 2, "GPUs have stages")
    on.watch(on.system, scheduler=False)
    assert on.ask_many(6, tokens=100) == [200] * 6
    yield


@contextmanager
def device(on: Watched) -> Iterator[None]:
    """The process of a GPU, which is ONNX Runtime's own CPU provider, is killed in the middle of requests until it is
    left alone."""
    with on.another() as system:
        worker = system.start_worker(device="gpu", gpu="cpu", canary_s="0.1")
        system.wait_ready(2)
        on.watch(system, scheduler=False)
        canaries = 'increase(blockrelay_worker_canaries_total{result="right"}[15s]) > 0'
        wait_until(lambda: on.seen(canaries), "Prometheus has seen one canary and another")
        for number in range(MAX_LOSSES):
            wait_until(lambda: _plan_has_gpu(system), "a GPU has the stage")
            jobs = make_jobs(4, seed=30 + number, vocab=POISON, tokens=300)
            system.accept_all(jobs)
            wait_until(lambda of=jobs: system.tokens_so_far(of) > 20, "they have tokens")
            os.kill(child_of(worker.pid), signal.SIGKILL)
            system.wait_all(jobs)
        yield
    worker.kill()
    worker.wait()
    wait_until(lambda: on.seen('up{job="blockrelay-worker"} == 0'), "Prometheus misses it")
    on.prometheus.forget_those_that_are_down("blockrelay-worker")


def _plan_has_gpu(system: System) -> bool:
    """And a worker that serves it."""
    plan = read_plan(system.client, system.keys, system.model_key)
    serve = [worker for worker in system.infos() if worker.device == "gpu" and worker.ready]
    return plan is not None and plan.route_class == "gpu" and bool(serve)


@contextmanager
def poison(on: Watched) -> Iterator[None]:
    """A request that no worker can compute."""
    with on.another(worker={"failpoint": f"worker.before_compute:raise#{POISON}"}) as failing:
        (job,) = make_jobs(1, seed=3, vocab=POISON)
        failing.accept(replace(job, prompt=(5, POISON)))
        wait_until(lambda: failing.client.xlen(failing.keys.dead_letters), "it is a dead letter")
        yield
        failing.client.delete(failing.keys.dead_letters)


@contextmanager
def numerics(on: Watched) -> Iterator[None]:
    """The worker of a numerics id dies with requests on it; who is left has another."""
    patience = {"BLOCKRELAY_NUMERICS_WAIT_S": "8"}
    with on.another(worker={"inject_numerics": "b"}, scheduler_env=patience) as system:
        jobs = make_jobs(4, seed=5, vocab=500, tokens=300)
        system.accept_all(jobs)
        wait_until(lambda: system.tokens_so_far(jobs) > 20, "they have tokens")
        (old,) = system.workers
        old.kill()
        old.wait()
        system.start_worker()
        yield
        system.wait_all(jobs)


@contextmanager
def memory(on: Watched) -> Iterator[None]:
    """Redis is allowed little more than it holds."""
    client = on.system.client
    used = int(client.info("memory")["used_memory"])  # pyright: ignore[reportGeneralTypeIssues]
    client.config_set("maxmemory", int(used / 0.6))
    try:
        yield
    finally:
        client.config_set("maxmemory", 0)


@contextmanager
def books(on: Watched) -> Iterator[None]:
    """Somebody has accepted what nobody knows."""
    totals = on.system.keys.totals(on.system.model_key)
    on.system.client.hincrby(totals, "accepted", 3)
    yield
    on.system.client.hincrby(totals, "accepted", -3)


@contextmanager
def tiers(on: Watched) -> Iterator[None]:
    """A worker of the whole model goes on without its payload Redis, whose pages it looks for."""
    with on.another(worker=STORE) as alone:
        alone.payload.kill()
        (job,) = make_jobs(1, seed=6, vocab=POISON)
        job = replace(job, prompt=tuple(range(3, 70)))
        alone.accept(job)
        alone.wait_all([job])
        yield


@contextmanager
def rewrite(on: Watched) -> Iterator[None]:
    """The process that rewrites the append-only file is killed."""
    client, server = on.system.client, on.system.control.process
    assert server is not None
    client.config_set("rdb-key-save-delay", 10_000_000)
    client.bgrewriteaof()
    wait_until(lambda: children_of(server.pid), "the file is written anew")
    for child in children_of(server.pid):
        os.kill(child, signal.SIGKILL)
    client.config_set("rdb-key-save-delay", 0)
    yield
    wait_until(lambda: not children_of(server.pid), "nobody writes it")
    client.bgrewriteaof()


@contextmanager
def redis(on: Watched) -> Iterator[None]:
    """Both servers are killed, and come back."""
    for server in (on.system.control, on.system.payload):
        server.kill()
    try:
        yield
    finally:
        for server in (on.system.control, on.system.payload):
            server.start()
    on.system.wait_ready(4)
    assert on.ask([5, 6, 7] * 20, tokens=4).status_code == 200


#: By the names that panels have for them.
CAUSES: dict[str, Cause] = {
    "load": load,
    "prefixes": prefixes,
    "tenants": tenants,
    "overload": overload,
    "crowd": crowd,
    "kill": kill,
    "gpu": gpu,
    "device": device,
    "poison": poison,
    "numerics": numerics,
    "memory": memory,
    "books": books,
    "tiers": tiers,
    "rewrite": rewrite,
    "redis": redis,
}
