"""Every service of a system under load is replaced by the next release and back, and every answer stays the same."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.number import PROTOCOL
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_launcher.client.resuming import resuming_stream
from tests.support.systems.next_release import COMMAND, NEXT
from tests.support.systems.system import OURS, Job, StartSystem, System, assert_nothing_is_held, golden_tokens
from tests.support.waiting import wait_until

PATH = "/v1/completions"
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, ignore_eos=True)
#: Requests differ in as many ways, however many there are: each answer is compared, and so many are computed for it.
KINDS = 50
CLIENTS = 4
#: Requests that are answered between two replacements, at least.
ANSWERS = 2 * CLIENTS


def prompt_of(key: str) -> tuple[int, ...]:
    return (5 + sum(key.encode()) % KINDS, 7, 9)


def job_of(key: str) -> Job:
    """What `key` asks for. The seed is its first token."""
    prompt = prompt_of(key)
    return Job(request_id=f"alone-{prompt[0]}", prompt=prompt, params=replace(PARAMS, seed=prompt[0]))


class Load:
    """Clients that send one request after the other, with keys, to any of `urls`, again until it is answered."""

    def __init__(self, urls: list[str]) -> None:
        self._urls, self._numbers, self._over = urls, count(), threading.Event()
        self.answers: dict[str, tuple[str, list[int]]] = {}

    def _client(self) -> None:
        while not self._over.is_set():
            key = f"key-{next(self._numbers)}"
            job = job_of(key)
            body: dict[str, Any] = {
                "prompt": list(job.prompt),
                "max_tokens": PARAMS.max_tokens,
                "seed": job.params.seed,
            }
            body |= {"max_tokens": PARAMS.max_tokens, "temperature": PARAMS.temperature}
            body |= {"ignore_eos": True, "return_token_ids": True}
            tokens: list[int] = []
            request_id = ""
            for event in resuming_stream(list(self._urls), PATH, body, key=key):
                request_id = event.id.partition(":")[0]
                for choice in event.data["choices"]:
                    tokens += choice["token_ids"]
            self.answers[key] = (own_id(request_id), tokens)

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients: list[Future[None]] = [pool.submit(self._client) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                self._over.set()
            for client in clients:
                client.result()

    def goes_on(self) -> None:
        """Some are answered that were not yet."""
        before = len(self.answers)
        wait_until(lambda: len(self.answers) >= before + ANSWERS, "requests are answered", timeout_s=60)


class Rolling:
    """Two gateways, a scheduler and two workers, each replaced by one of another release while the load goes on."""

    def __init__(self, system: System) -> None:
        self.system, self.urls = system, list[str]()
        self.load = Load(self.urls)

    def start(self) -> None:
        self.system.start_scheduler()
        for _ in range(2):
            self.system.start_worker(drain_s="60")
            self.urls.append(self.system.start_gateway()[0])
        self.system.wait_ready(2)

    def replace(self, command: tuple[str, ...], scheduler: dict[str, str] | None = None) -> None:
        """All of them by services that `command` starts; `scheduler`: settings of its own."""
        system, load = self.system, self.load
        system.command = command
        old_workers, old_gateways = list(system.workers), list(system.gateways)
        system.scheduler_env = scheduler or {}
        (old_scheduler,) = system.schedulers
        system.start_scheduler()
        ended(old_scheduler, system.schedulers)
        load.goes_on()
        for worker in old_workers:
            before = {info.pid for info in system.infos()}
            system.start_worker(drain_s="60")
            wait_until(
                lambda known=before: any(one.ready and one.pid not in known for one in system.infos()),
                "the new worker is ready",
                timeout_s=60,
            )
            ended(worker, system.workers)
            load.goes_on()
        for gateway in old_gateways:
            self.urls.append(system.start_gateway()[0])
            self.urls.pop(0)
            load.goes_on()
            ended(gateway, system.gateways)
            load.goes_on()

    def number(self) -> int:
        return int(self.system.client.get(self.system.keys.protocol) or 0)  # pyright: ignore


def ended(process: "subprocess.Popen[bytes]", among: list["subprocess.Popen[bytes]"]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == 0
    among.remove(process)


@pytest.fixture
def rolling(start_system: StartSystem) -> Iterator[Callable[[tuple[str, ...]], Rolling]]:
    def start(command: tuple[str, ...]) -> Rolling:
        system = start_system(scheduler=False, replicas=0)
        system.command = command
        found = Rolling(system)
        found.start()
        return found

    yield start


def test_services_of_two_releases_serve_one_cell(rolling: Callable[[tuple[str, ...]], Rolling]) -> None:
    found = rolling(OURS)
    system = found.system
    assert found.number() == PROTOCOL
    with found.load.running():
        found.load.goes_on()
        found.replace(COMMAND, {"BLOCKRELAY_RAISE_PROTOCOL": "false"})
        assert found.number() == PROTOCOL, "there is a way back"
        found.replace(OURS)
        found.replace(COMMAND)
        wait_until(lambda: found.number() == NEXT, "the number is raised", timeout_s=60)
        found.load.goes_on()
    answers = list(found.load.answers.items())
    kinds = {job.request_id: job for key, _ in answers if (job := job_of(key))}
    golden = golden_tokens(system.block_folder, list(kinds.values()))
    assert {key: tokens for key, (_, tokens) in answers} == {key: golden[job_of(key).request_id] for key, _ in answers}
    records = [system.client.hgetall(system.keys.request(request_id)) for _, (request_id, _) in answers]
    assert {record.get(b"rerun_reason", b"drain") for record in records} == {b"drain"}  # pyright: ignore
    assert {int(record[b"v"]) for record in records} == {PROTOCOL, NEXT}  # pyright: ignore
    books = system.client.hgetall(system.keys.totals(system.model_key))
    assert int(books[b"accepted"]) == len(answers), "one key is one request"  # pyright: ignore
    assert_nothing_is_held(system)

    system.command = OURS
    late = system.start_scheduler()
    assert late.wait(30) == 2, "the older release says that the cell has gone on, and ends"
    system.schedulers.remove(late)
    assert f"speaks protocol {NEXT}" in (system.folder / "scheduler.log").read_text()


def test_the_number_waits_for_the_last_service_of_the_release_before(
    rolling: Callable[[tuple[str, ...]], Rolling],
) -> None:
    """The services that keep it back are named meanwhile."""
    found = rolling(OURS)
    system = found.system
    system.command = COMMAND
    (old,) = system.schedulers
    system.start_scheduler()
    ended(old, system.schedulers)
    log = system.folder / "scheduler.log"
    for gateway in list(system.gateways):
        wait_until(lambda: "PROTOCOL_KEPT" in log.read_text(), "it is said who keeps it", timeout_s=60)
        ended(gateway, system.gateways)
    one, other = list(system.workers)
    for worker in (one, other):
        assert found.number() == PROTOCOL
        system.start_worker()
        worker.kill()  # nobody has heard of its end
        system.workers.remove(worker)
        worker.wait()
    wait_until(lambda: found.number() == NEXT, "the number is raised", timeout_s=60)
    system.wait_ready(2)
