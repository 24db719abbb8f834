"""Every panel of every dashboard, asked of a real Prometheus: the value that it shows differs between a quiet system
and one that meets what the panel is for.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockrelay.auth.api_keys import Tenant, add_key
from blockrelay_launcher.supervisor.ports import kept_ports
from deploy.dashboards.__main__ import DASHBOARDS
from deploy.dashboards.panel import Cause, Panel
from tests.support.prometheus import Prometheus, Series, running_prometheus
from tests.support.promql import filled_in
from tests.support.systems.system import StartSystem, System, make_jobs
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.observability, pytest.mark.timeout(900)]

#: Seconds without anything before a system counts as quiet: longer than rates look back.
QUIET_S = 18
#: A token that the poisonous request has and no other.
POISON = 77
PAGE_BYTES = 2 * 4 * 2 * 16 * 16 * 2
STORE = {"page_store_redis_bytes": str(64 << 20)}


@dataclass
class Watched:
    """A system with a gateway, Prometheus beside it, and an API key of each kind."""

    system: System
    prometheus: Prometheus
    url: str
    operator: str
    tenant: str
    start: StartSystem

    def ask(self, prompt: list[int], *, tokens: int = 40, key: str = "", **more: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}
        headers = {"authorization": f"Bearer {key or self.operator}"}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=120)

    def ask_many(self, count: int, **how: Any) -> list[int]:
        """Statuses of so many different requests at once."""
        jobs = make_jobs(count, seed=count, vocab=POISON, longest=40)
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda job: self.ask(list(job.prompt), **how).status_code, jobs))

    def watch_workers(self) -> None:
        live = [worker for worker in self.system.infos() if worker.state == "ready"]
        self.prometheus.add("blockrelay-worker", *(f"127.0.0.1:{worker.port}" for worker in live))


@pytest.fixture
def watched(start_system: StartSystem, tmp_path: Path) -> Iterator[Watched]:
    operator = add_key(keys := tmp_path / "keys.json", Tenant(name="chief", operator=True))
    tenant = add_key(keys, Tenant(name="ada", tokens_per_minute=200))
    system = start_system(
        stages=2,
        replicas=2,
        worker=STORE,
        scheduler_env={"BLOCKRELAY_NUMERICS_WAIT_S": "3"},
    )
    url, _ = system.start_gateway(api_keys=str(keys), max_in_flight="24", grace_s="0.2")
    with ExitStack() as stack:
        (port,) = stack.enter_context(kept_ports("127.0.0.1", 0, 1))
        (tmp_path / "operator-key").write_text(operator)
        secret = {"authorization": {"credentials_file": str(tmp_path / "operator-key")}}
        jobs: dict[str, dict[str, Any]] = {
            "blockrelay-gateway": {},
            "blockrelay-scheduler": {},
            "blockrelay-worker": {},
            "blockrelay-tenants": {"metrics_path": "/metrics/tenants", **secret},
        }
        prometheus = stack.enter_context(running_prometheus(tmp_path / "prometheus", port, jobs))
        found = Watched(system, prometheus, url, operator, tenant, start_system)
        found.watch_workers()
        for job in ("blockrelay-gateway", "blockrelay-tenants"):
            prometheus.add(job, url.removeprefix("http://"))
        prometheus.add("blockrelay-scheduler", f"127.0.0.1:{port_of_scheduler(system)}")
        yield found


def port_of_scheduler(system: System) -> int:
    ready = re.search(r'"NODE_READY".*"port": (\d+)', (system.folder / "scheduler.log").read_text())
    assert ready is not None
    return int(ready[1])


def load(on: Watched) -> None:
    """Long enough that workers have measured themselves, and schedulers and Prometheus have looked."""
    for count in (10, 11, 12):
        assert on.ask_many(count, tokens=300) == [200] * count


def prefixes(on: Watched) -> None:
    """A long beginning that all share, and that says the same again and again."""
    beginning = [5, 6, 7, 8, 9, 10, 11, 12] * 12
    for index in range(6):
        assert on.ask([*beginning, 20 + index], tokens=60, temperature=0).status_code == 200


def tenants(on: Watched) -> None:
    statuses = [on.ask([index + 3] * 10, tokens=40, key=on.tenant).status_code for index in range(8)]
    assert set(statuses) == {200, 429}


def overload(on: Watched) -> None:
    """More requests than may be in flight, a client that leaves, and beside them a cell whose pages are too few."""
    narrow = on.start(stages=1, worker={"kv_bytes": str(12 * PAGE_BYTES)})
    on.prometheus.add("blockrelay-worker", *(f"127.0.0.1:{worker.port}" for worker in narrow.infos()))
    crowd = make_jobs(20, seed=21, vocab=500, longest=60, tokens=70)
    for job in crowd:
        narrow.accept(job)
    assert set(on.ask_many(60, tokens=300)) == {200, 503}
    headers = {"authorization": f"Bearer {on.operator}"}
    body = {"prompt": [5], "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{on.url}/v1/completions", json=body, headers=headers) as leaving:
        next(leaving.iter_lines())
    narrow.wait_all(crowd)


def kill(on: Watched) -> None:
    """-9 for all workers of a stage, in the middle of requests; new ones when it has been seen."""
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(on.ask_many, 8, tokens=300)
        wait_until(lambda: on.system.client.zcard(on.system.keys.running) == 8, "they run")
        dying = {worker.pid for worker in on.system.infos() if worker.stage == 1}
        for process in on.system.workers:
            if process.pid in dying:
                process.kill()
                process.wait()
        seen = lambda: on.prometheus.values('blockrelay_ready{question="tokens"} == 0', time.time() - 3)  # noqa: E731
        wait_until(seen, "nobody serves the stage")
        wait_until(lambda: oldest_waits(on), "somebody stands still")
        for _ in dying:
            on.system.start_worker(**STORE)
        on.system.wait_ready(4)
        assert answers.result() == [200] * 8
    on.watch_workers()


def oldest_waits(on: Watched) -> bool:
    told = on.prometheus.values("max(blockrelay_oldest_waiting_seconds)", time.time() - 3)
    return any(max(values) > 3 for values in told.values())


def gpu(on: Watched) -> None:
    """A GPU's worker fails in the middle of a request, which goes on on CPUs."""
    for _ in range(2):
        on.system.start_worker(device="gpu", inject_fault="3")
    wait_until(lambda: len([w for w in on.system.infos() if w.device == "gpu" and w.ready]) == 2, "GPUs have stages")
    on.watch_workers()
    assert on.ask_many(6, tokens=100) == [200] * 6


def poison(on: Watched) -> None:
    """A request that no worker can compute."""
    failing = on.start(stages=1, worker={"failpoint": f"worker.before_compute:raise#{POISON}"})
    on.prometheus.add("blockrelay-scheduler", f"127.0.0.1:{port_of_scheduler(failing)}")
    (job,) = make_jobs(1, seed=3, vocab=POISON)
    failing.accept(replace(job, prompt=(5, POISON)))
    wait_until(lambda: failing.client.xlen(failing.keys.dead_letters), "it is a dead letter")


def numerics(on: Watched) -> None:
    """Workers of one numerics id die with requests on them; those who are left have another."""
    system = on.start(stages=1, worker={"inject_numerics": "b"}, scheduler_env={"BLOCKRELAY_NUMERICS_WAIT_S": "4"})
    on.prometheus.add("blockrelay-scheduler", f"127.0.0.1:{port_of_scheduler(system)}")
    jobs = make_jobs(4, seed=5, vocab=500, tokens=300)
    for job in jobs:
        system.accept(job)
    wait_until(lambda: system.tokens_so_far(jobs) > 20, "they have tokens")
    (old,) = system.workers
    system.start_worker()
    old.kill()
    old.wait()
    system.wait_all(jobs)


def memory(on: Watched) -> None:
    """Redis is allowed little more than it holds."""
    client = on.system.client
    used = int(client.info("memory")["used_memory"])  # pyright: ignore
    client.config_set("maxmemory", int(used / 0.6))
    try:
        shown = lambda: on.prometheus.values("blockrelay_ended_requests_forgotten_total > 0", time.time() - 3)  # noqa: E731
        wait_until(shown, "ended requests are forgotten")
    finally:
        client.config_set("maxmemory", 0)


def redis(on: Watched) -> None:
    """Both servers are killed, and come back. A worker of the whole model goes on without its payload Redis."""
    alone = on.start(stages=1, worker=STORE)
    on.prometheus.add("blockrelay-worker", *(f"127.0.0.1:{worker.port}" for worker in alone.infos()))
    alone.payload.kill()
    (job,) = make_jobs(1, seed=6, vocab=POISON, longest=200)
    job = replace(job, prompt=tuple(range(3, 70)))
    alone.accept(job)
    alone.wait_all([job])
    for server in (on.system.control, on.system.payload):
        server.kill()
    try:
        seen = lambda: on.prometheus.values('blockrelay_ready{question="accepting"} == 0', time.time() - 3)  # noqa: E731
        wait_until(seen, "nothing is accepted")
    finally:
        for server in (on.system.control, on.system.payload):
            server.start()
    on.system.wait_ready(4)
    assert on.ask([5, 6, 7] * 20, tokens=4).status_code == 200


CAUSES: dict[Cause, Callable[[Watched], None]] = {
    "load": load,
    "prefixes": prefixes,
    "tenants": tenants,
    "overload": overload,
    "kill": kill,
    "gpu": gpu,
    "poison": poison,
    "numerics": numerics,
    "memory": memory,
    "redis": redis,
}


def shown(on: Watched, panel: Panel, since: float) -> list[Series]:
    return [on.prometheus.values(filled_in(query.expr), since) for query in panel.queries]


def differ(quiet: list[Series], now: list[Series]) -> bool:
    """Whether some value of some series lies outside of what was shown in quiet."""
    for before, after in zip(quiet, now, strict=True):
        for series, values in after.items():
            known = before.get(series, [])
            if not known or min(values) < min(known) or max(values) > max(known):
                return True
    return False


def test_every_panel_shows_what_it_is_for(watched: Watched) -> None:
    panels = [(board.name, panel) for board in DASHBOARDS for panel in board.panels]
    assert {panel.cause for _, panel in panels} == {*CAUSES, "never"}
    began = time.time()
    threading.Event().wait(QUIET_S)  # what rates of a quiet time look back on
    quiet_from = time.time() - 3
    quiet = {(board, panel.title): shown(watched, panel, quiet_from) for board, panel in panels}
    for cause, happen in CAUSES.items():
        started = time.time()
        happen(watched)
        waiting = {(board, panel.title): panel for board, panel in panels if panel.cause == cause}

        def all_differ(waiting: dict[tuple[str, str], Panel] = waiting, since: float = started) -> bool:
            for name, panel in list(waiting.items()):
                if differ(quiet[name], shown(watched, panel, since)):
                    del waiting[name]
            return not waiting

        try:
            wait_until(all_differ, f"its panels show {cause}", poll_s=0.2)
        except AssertionError as error:
            raise AssertionError(f"{cause} is not shown by {sorted(waiting)}") from error
    for board, panel in panels:
        told = shown(watched, panel, began)
        assert all(told), f"{board}: {panel.title} has a query without a value"
        if panel.cause == "never":
            assert {value for series in told for values in series.values() for value in values} == {0.0}
