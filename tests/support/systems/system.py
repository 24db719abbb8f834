"""A real system without a gateway: Redis servers, a scheduler and workers as processes; the test plays the gateway."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import redis

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.errors import RedisTrouble
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import EndEntry, RequestBody, TokenEntry
from blockrelay.protocol.plan import WorkerInfo, missing_stages
from blockrelay.protocol.sampling_params import SamplingParams, derive_seed
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import Scripts
from blockrelay.redis.registry import read_accounting, read_plan, read_workers
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_launcher.supervisor.ports import kept_ports
from blockrelay_worker.offline.pipeline import Pipeline, generate
from tests.support.cell import read_log
from tests.support.redis.redis_server import RedisServer
from tests.support.scraping import sampled
from tests.support.waiting import wait_until

PLAYING_GPU, FAILING_GPU = "tests.support.worker.playing_gpu", "tests.support.worker.failing_gpu"
SLOW_WORKER = "tests.support.worker.slow_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request as the tests know it; `golden` is what an undisturbed solo run gives."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def body(self) -> RequestBody:
        return RequestBody(prompt=np.array(self.prompt, np.int32), params=self.params.to_dict())


#: Starts a service of this release.
OURS = (sys.executable, "-m")


def make_jobs(count: int, *, seed: int, vocab: int, longest: int = 60, tokens: int = 24) -> list[Job]:
    """Mixed lengths; every second one sampled, the others greedy."""
    rng = np.random.default_rng(seed)
    jobs: list[Job] = []
    for i in range(count):
        prompt = tuple(int(t) for t in rng.integers(3, vocab, rng.integers(1, longest)))
        temperature = 0.0 if i % 2 else 0.8
        params = SamplingParams(max_tokens=tokens, temperature=temperature, top_p=0.9, ignore_eos=True)
        jobs.append(Job(request_id=f"req-{seed}-{i}", prompt=prompt, params=params))
    return jobs


def golden_tokens(folder: BlockFolder, jobs: Sequence[Job], *, seed: int | None = None) -> dict[str, list[int]]:
    """Request -> tokens of a solo run in one process, without queue, batch or Redis.

    `seed` None: that of each request's params, or its default, derived from its id.
    """

    def seed_of(job: Job) -> int:
        own = job.params.seed if seed is None else seed
        return derive_seed(job.request_id) if own is None else own

    pipeline = Pipeline(folder, stages=1, threads=1, tokens=folder.model.max_position)
    tokenizer = Tokenizer.from_file(folder.tokenizer_path) if folder.tokenizer_path else None
    return {
        job.request_id: generate(
            pipeline,
            job.prompt,
            job.params,
            seed=seed_of(job),
            tokenizer=tokenizer,
        ).tokens
        for job in jobs
    }


def scrape(worker: WorkerInfo) -> str:
    """What its /metrics says."""
    with urllib.request.urlopen(f"http://{worker.host}:{worker.port}/metrics", timeout=5) as answer:
        return answer.read().decode()


@dataclass
class System:
    """Processes write their logs into `folder`. `command` starts a service, whose module comes behind it."""

    folder: Path
    model: Path
    control: RedisServer
    payload: RedisServer
    stages: int = 1
    cell: str = "t"
    scheduler_env: dict[str, str] = field(default_factory=dict[str, str])
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    gateways: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    schedulers: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    command: tuple[str, ...] = OURS

    def __post_init__(self) -> None:
        self.keys = Keys(self.cell)
        self.client: redis.Redis = self.control.client()
        self.scripts = Scripts(self.client, self.keys)
        self.block_folder = open_block_folder(self.model)
        self.model_key = self.block_folder.model_key

    def _spawn(self, module: str, name: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
        common = {
            "BLOCKRELAY_MODEL": str(self.model),
            "BLOCKRELAY_REDIS_URL": self.control.url,
            "BLOCKRELAY_PAYLOAD_REDIS_URL": self.payload.url,
            "BLOCKRELAY_CELL": self.cell,
            "BLOCKRELAY_PORT": "0",
            "BLOCKRELAY_DRAIN_S": "0",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*self.command, module], env={**os.environ, **common, **env}, stdout=log, stderr=log
            )

    def start_scheduler(self, **env: str) -> subprocess.Popen[bytes]:
        """As `start_worker`."""
        variables = {"BLOCKRELAY_STAGES": str(self.stages), **self.scheduler_env, **_variables(env)}
        self.schedulers.append(self._spawn("blockrelay_scheduler", "scheduler", variables))
        return self.schedulers[-1]

    @property
    def scheduler(self) -> subprocess.Popen[bytes] | None:
        """The newest one."""
        return self.schedulers[-1] if self.schedulers else None

    def start_gateway(self, **env: str) -> tuple[str, subprocess.Popen[bytes]]:
        """Its URL, once it answers, and the process. Environment as in `start_worker`."""
        with kept_ports("127.0.0.1", 0, 1) as (port,):
            variables = _variables({"port": str(port), **env})
            gateway = self._spawn("blockrelay_gateway", f"gateway-{len(self.gateways)}", variables)
            self.gateways.append(gateway)
            url = f"http://127.0.0.1:{port}"

            def answers() -> bool:
                try:
                    with urllib.request.urlopen(f"{url}/livez", timeout=1) as answer:
                        return answer.status == 200
                except OSError:
                    return gateway.poll() is not None

            wait_until(answers, "the gateway answers")
        return url, gateway

    def start_worker(self, **env: str) -> subprocess.Popen[bytes]:
        """Environment by field name in lower case: gpu="cpu"."""
        worker = self._spawn("blockrelay_worker", f"worker-{len(self.workers)}", _variables(env))
        self.workers.append(worker)
        return worker

    def start_playing_gpu(self, **env: str) -> subprocess.Popen[bytes]:
        """A worker of the class gpu that computes on this CPU; environment as of `start_worker`."""
        return self._start_double(PLAYING_GPU, {"device": "gpu", **env})

    def start_failing_gpu(self, *, after: int) -> subprocess.Popen[bytes]:
        """A worker of the class gpu whose batches fail behind the first `after`."""
        return self._start_double(FAILING_GPU, {"device": "gpu"}, FAIL_AFTER=str(after))

    def start_slow_worker(self, *, row_s: float, **env: str) -> subprocess.Popen[bytes]:
        """A worker of the CPU for which each row takes `row_s` more; environment as of `start_worker`."""
        return self._start_double(SLOW_WORKER, env, SLOW_ROW_S=str(row_s))

    def _start_double(self, module: str, env: dict[str, str], **told: str) -> subprocess.Popen[bytes]:
        variables = _variables(env) | told | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.workers.append(self._spawn(module, f"worker-{len(self.workers)}", variables))
        return self.workers[-1]

    def infos(self) -> list[WorkerInfo]:
        return read_workers(self.client, self.keys, self.model_key)

    def wait_ready(self, workers: int) -> None:
        """`workers` live workers with a stage, no stage without one, and each stage of a GPU shown on it by the plan,
        so that the next request is for it."""

        def ready() -> bool:
            infos = [w for w in self.infos() if w.ready and w.silent_ms < 3000]
            plan = read_plan(self.client, self.keys, self.model_key)
            if plan is None or len(infos) < workers or missing_stages(plan, infos):
                return False
            return all(plan.blocks[f"block_{w.first}"] == "GPU" for w in infos if w.device == "gpu")

        wait_until(ready, f"{workers} workers are ready", timeout_s=60)

    def pid_of(self, stage: int) -> int:
        """Process of a live worker of this stage."""
        return next(w.pid for w in self.infos() if w.stage == stage and w.ready and w.silent_ms < 3000)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all live workers of a metric."""
        return sum(sampled(scrape(worker), name, **labels) for worker in self.infos())

    def reruns(self) -> Mapping[str, int]:
        """How many runs were ever ended and queued again, by reason; without those that none had."""
        return read_accounting(self.client, self.keys, self.model_key).reruns

    def refused_commits(self, pid: int) -> bool:
        """Whether COMMIT has told this process that a run of it is no longer the current one.

        False too while the process is between two lives in the registry.
        """
        for worker in [w for w in self.infos() if w.pid == pid]:
            return sampled(scrape(worker), "blockrelay_worker_commits_total", verdict="LOST") > 0
        return False

    def accept(self, job: Job, *, fallback: str = "allow", **more: object) -> None:
        need = -(-(len(job.prompt) + job.params.max_tokens) // 16)
        call = calls.accept(
            job.request_id,
            replace(job.body, fallback=fallback),
            model=self.model_key,
            pages_needed=need,
            max_in_flight=10_000,
            **more,  # pyright: ignore[reportArgumentType]
        )
        answer = self.scripts.run(call)
        assert answer.status == "OK", answer

    def accept_all(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self.accept(job)

    def log(self, request_id: str) -> tuple[list[int], EndEntry | None]:
        tokens: list[int] = []
        end: EndEntry | None = None
        for entry in read_log(self.client, self.keys, request_id):
            if isinstance(entry, TokenEntry):
                tokens.append(entry.token)
            else:
                end = entry
        return tokens, end

    def all_ended(self, jobs: Sequence[Job]) -> bool:
        try:
            return all(self.log(job.request_id)[1] is not None for job in jobs)
        except RedisTrouble:
            return False

    def tokens_so_far(self, jobs: Sequence[Job]) -> int:
        return sum(len(self.log(job.request_id)[0]) for job in jobs)

    def wait_all(self, jobs: Sequence[Job], timeout_s: float = 90) -> None:
        wait_until(lambda: self.all_ended(jobs), "all requests ended", timeout_s=timeout_s)

    def results(self, jobs: Sequence[Job]) -> dict[str, list[int]]:
        """Tokens of every request; fails unless each ended by length or stop."""
        found: dict[str, list[int]] = {}
        for job in jobs:
            tokens, end = self.log(job.request_id)
            assert end is not None and end.reason in ("length", "stop"), (job.request_id, end)
            found[job.request_id] = tokens
        return found

    def stop(self) -> None:
        processes = [*self.gateways, *self.workers, *self.schedulers]
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGINT if process in self.gateways else signal.SIGTERM)  # no gateway drains
        end = time.monotonic() + 10
        for process in processes:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.client.close()


def _variables(env: dict[str, str]) -> dict[str, str]:
    return {f"BLOCKRELAY_{name.upper()}": value for name, value in env.items()}


#: `start_system(stages=2, replicas=1, worker={...}, model=folder)`, see tests/support/systems/fixtures.py.
StartSystem = Callable[..., System]
#: Requests and their tokens in an undisturbed run.
Golden = tuple[list[Job], dict[str, list[int]]]


def start_all(system: System, jobs: list[Job]) -> None:
    """Accept all and return in the middle: every request runs, none has ended."""
    system.accept_all(jobs)
    wait_until(lambda: system.tokens_so_far(jobs) > 5 * len(jobs), "the requests are under way")


def assert_nothing_is_held(system: System) -> None:
    """No reservation, no membership, no job is left behind."""

    def held() -> bool:
        return any(w.reserved or w.running for w in system.infos()) or bool(system.client.zcard(system.keys.running))

    wait_until(lambda: not held(), "all reservations are given back", timeout_s=5)
    for route_class in ("cpu", "gpu"):
        assert system.client.zcard(system.keys.queue(system.model_key, route_class)) == 0
        assert system.client.xlen(system.keys.reruns(system.model_key, route_class)) == 0
    books = system.client.hgetall(system.keys.outstanding(system.model_key))
    assert not any(int(value) for value in books.values()), books  # pyright: ignore
    for a, b in pairwise(system.infos()):
        assert a.id != b.id


def assert_undisturbed(system: System, jobs: Sequence[Job], golden: dict[str, list[int]] | None = None) -> None:
    """All end with the tokens of an undisturbed run (`golden`, or one that is done now), and nothing is held."""
    system.wait_all(jobs)
    assert system.results(jobs) == (golden_tokens(system.block_folder, jobs) if golden is None else golden)
    assert_nothing_is_held(system)


def serve_while_workers_die(system: System, jobs: list[Job]) -> None:
    """Begin the jobs, end two workers by kill -9, and see that the jobs end as if nothing had happened."""
    start_all(system, jobs)
    for worker in (1, 0):
        os.kill(system.pid_of(worker), signal.SIGKILL)
    assert_undisturbed(system, jobs)


def serve(system: System, jobs: Sequence[Job], golden: dict[str, list[int]] | None = None) -> None:
    """Accept the jobs, and see that they end as if nothing had happened."""
    system.accept_all(jobs)
    assert_undisturbed(system, jobs, golden)
