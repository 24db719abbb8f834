"""A running system in which one process after the other is replaced by one that fails at a chosen point."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_launcher.client.resuming import resuming_stream
from tests.support.redis.redis_server import RedisServer
from tests.support.systems.system import Job, System, assert_nothing_is_held, golden_tokens
from tests.support.waiting import wait_until

Process = subprocess.Popen[bytes]
DEAD_AFTER_S = 1.0
#: Long enough that every point is passed before the end; the first shares its beginning with the second.
SHAPES = ((40, 0.0), (35, 0.8), (7, 0.8))
TOKENS = 120


@dataclass
class Stand:
    """Two stages with a worker each. Every case leaves it as it found it."""

    system: System
    pages: Path
    golden: list[list[int]]
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    _cases: Iterator[int] = field(default_factory=count)

    def worker(self, **env: str) -> Process:
        settings = {
            "page_store_folder": str(self.pages),
            "beat_s": "0.2",
            **self.settings,
        }
        return self.system.start_worker(**settings, **env)

    @contextmanager
    def victim(self, start: Process) -> Iterator[Process]:
        """Whatever happens inside, the process is gone afterwards."""
        try:
            yield start
        finally:
            start.kill()
            start.wait()

    def full(self) -> None:
        """A healthy scheduler and a healthy worker at each stage."""
        if self.system.scheduler is None or self.system.scheduler.poll() is not None:
            self.system.start_scheduler()
        living = {w.stage for w in self.system.infos() if w.ready and w.silent_ms < 1000 * DEAD_AFTER_S}
        for _ in range(self.system.stages - len(living)):
            self.worker()
        self.system.wait_ready(self.system.stages)

    def vacate(self, stage: int) -> None:
        """End properly the workers of a stage, and whoever is still on the way to it."""
        infos = self.system.infos()
        others = {w.pid for w in infos if w.ready and w.stage != stage}
        leaving = [p for p in self.system.workers if p.poll() is None and p.pid not in others]
        for process in leaving:
            process.terminate()
        registered = {w.pid for w in infos}
        for process in leaving:  # the signal ends at once a process that is still importing
            assert process.wait(30) == 0 or (process.pid not in registered and process.returncode == -signal.SIGTERM)

    def jobs(self) -> list[Job]:
        """The same requests for every case, under new names."""
        case = next(self._cases)
        return [replace(job, request_id=f"req-{case}-{i}") for i, job in enumerate(shapes())]

    def accept(self, count: int = len(SHAPES)) -> list[Job]:
        """Queue the first `count` of them."""
        jobs = self.jobs()[:count]
        self.system.accept_all(jobs)
        return jobs

    def check(self, jobs: list[Job], timeout_s: float = 60) -> None:
        """All end, with the tokens of the undisturbed run, and nothing is held."""
        self.system.wait_all(jobs, timeout_s=timeout_s)
        assert list(self.system.results(jobs).values()) == self.golden[: len(jobs)]
        assert_nothing_is_held(self.system)

    def check_failed(self, job: Job) -> None:
        """It ends with an error, behind tokens of the undisturbed run."""
        wait_until(lambda: self.system.log(job.request_id)[1] is not None, "it ends")
        tokens, end = self.system.log(job.request_id)
        assert end is not None and end.reason == "error"
        assert tokens == self.golden[0][: len(tokens)]
        assert_nothing_is_held(self.system)

    def now_ms(self) -> int:
        """Redis' clock, which decides about deadlines."""
        seconds, micros = self.system.client.time()
        return seconds * 1000 + micros // 1000

    def log_of(self, process: Process) -> str:
        numbered = [("worker", self.system.workers), ("gateway", self.system.gateways)]
        for name, processes in numbered:
            if process in processes:
                return (self.system.folder / f"{name}-{processes.index(process)}.log").read_text()
        return (self.system.folder / "scheduler.log").read_text()

    def passed(self, process: Process, point: str, action: str) -> bool:
        """Whether its log says that the action happened there."""
        return f'"point": "{point}", "action": "{action}"' in self.log_of(process)

    def sprung(self, process: Process, point: str, action: str) -> bool:
        """Whether the process has passed the point, and is dead, or asleep, as it should be."""
        if not self.passed(process, point, action):
            return False
        if action == "kill":
            return process.poll() == -signal.SIGKILL
        return action != "stop" or state_of(process.pid) == "T"

    def wait_sprung(self, process: Process, point: str, action: str) -> None:
        wait_until(lambda: self.sprung(process, point, action), f"{point}:{action} has happened")


def shapes() -> list[Job]:
    prompt = tuple(range(3, 43))
    return [
        Job(
            request_id="",
            prompt=prompt[:length],
            params=SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=7, ignore_eos=True),
        )
        for length, temperature in SHAPES
    ]


def state_of(pid: int) -> str:
    """The kernel's letter for the state of a process: T is stopped, Z a zombie."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def standing(model: Path, **settings: str) -> Iterator[Stand]:
    """`settings` of all workers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="br-faults-", ignore_cleanup_errors=True)))
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        pages = Path(stack.enter_context(TemporaryDirectory(prefix="br-pages-", dir=shm)))
        control, payload = RedisServer(folder / "c").start(), RedisServer(folder / "p", durable=False).start()
        stack.callback(payload.stop)
        stack.callback(control.stop)
        stack.callback(control.assert_nothing_is_ownerless)
        system = System(folder=folder, model=model, control=control, payload=payload, stages=2)
        system.scheduler_env = {"BLOCKRELAY_DEAD_AFTER_S": str(DEAD_AFTER_S)}
        stack.callback(system.stop)
        jobs = [replace(job, request_id=str(i)) for i, job in enumerate(shapes())]
        golden = list(golden_tokens(system.block_folder, jobs, seed=7).values())
        stand = Stand(system, pages, golden, settings)
        stand.full()
        stand.check(stand.accept())  # from now on the page folder knows their beginnings
        yield stand


def registered(stand: Stand) -> set[int]:
    return {w.pid for w in stand.system.infos()}


def body_of(job: Job) -> dict[str, Any]:
    params = job.params
    return {
        "model": "tiny",
        "prompt": list(job.prompt),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def positions_and_tokens(gateways: list[str], body: dict[str, Any], key: str) -> tuple[list[int], list[int]]:
    """Positions of the events and all tokens, as a client that resumes sees them."""
    positions: list[int] = []
    tokens: list[int] = []
    for event in resuming_stream(gateways, "/v1/completions", body, key=key, patience_s=60):
        assert "error" not in event.data, event
        positions.append(int(event.id.rpartition(":")[2]))
        for choice in event.data["choices"]:
            tokens += choice.get("token_ids") or []
    return positions, tokens
