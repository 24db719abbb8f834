"""A gateway with the memory of the shipped pod, 512 MiB, under bodies and answers that want many times that."""

import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Claimed
from blockrelay.protocol.tensors import encode_result
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import Scripts
from tests.support.gateway.hostile_bodies import MIB, hostile_bodies, step_with_all_logits
from tests.support.gateway.played import PlayedWorker, answering
from tests.support.models.wide_model import write_wide_model
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

LIMIT = 512 * MIB
#: What the gateway takes by itself in a container with that limit: a quarter of what its own start leaves.
BUDGET = 112 * MIB
VOCAB, TOKENS = 50_000, 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer and a wide vocabulary: answers are large, and cost nothing."""
    return write_wide_model(tmp_path_factory.mktemp("wide"), VOCAB)


@pytest.fixture
def payload() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="br-test-") as place:
        server = RedisServer(Path(place), durable=False).start()
        yield server
        server.stop()


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway in a process of its own."""

    process: subprocess.Popen[bytes]
    url: str

    def resident(self) -> int:
        """Bytes of it and of its helpers, as a container counts them: what they have of files is there once."""
        processes = [self.process.pid]
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(stat.read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    processes.append(int(stat.parent.name))
            except OSError:
                continue  # it has ended meanwhile
        found = [_resident(process) for process in processes]
        return sum(own for own, _ in found) + max(files for _, files in found)


def _resident(process: int) -> tuple[int, int]:
    """Bytes of a process that are its own, and those of files; none once it has ended."""
    try:
        lines = (Path("/proc") / str(process) / "status").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split()[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return sizes.get("RssAnon:", 0), sizes.get("RssFile:", 0)


@contextmanager
def gateway_of(model: Path, control: RedisServer, payload: RedisServer, log: Path) -> Iterator[Gateway]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"model": model, "redis-url": control.url, "payload-redis-url": payload.url, "cell": "t", "port": port}
    command = [sys.executable, "-m", "blockrelay_gateway", "--max-bodies-bytes", str(BUDGET)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"

        def alive() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return httpx.get(f"{url}/livez").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(alive, "the gateway answers", timeout_s=60)
        yield Gateway(process, url)
    finally:
        process.send_signal(signal.SIGINT)  # what is under way has nobody who answers it
        assert process.wait(30) == 0, log.read_text()[-2000:]


def test_it_is_never_killed_and_serves_others_meanwhile(
    model: Path, own_redis: RedisServer, payload: RedisServer, tmp_path: Path
) -> None:
    bodies, logits = hostile_bodies(), np.random.default_rng(1).standard_normal((TOKENS, VOCAB), np.float32)
    result, step = encode_result(logits), step_with_all_logits(TOKENS)
    stop, peak = threading.Event(), [0]
    keys = Keys("t")
    with (
        redis_link.connect(own_redis.url) as client,
        redis_link.connect(payload.url) as results,
        gateway_of(model, own_redis, payload, tmp_path / "log") as gateway,
        ThreadPoolExecutor(80) as threads,
    ):
        name = open_block_folder(model, blocks=()).model_key
        worker = PlayedWorker(client=client, scripts=Scripts(client, keys), keys=keys, model=name).register()

        def watch() -> None:
            while not stop.wait(0.02):
                peak[0] = max(peak[0], gateway.resident())

        def reply(claimed: Claimed) -> tuple[list[int], str] | None:
            if claimed.body.logits != "all":
                return [5], "stop"
            _store(results, keys, claimed, result)
            worker.say(claimed, [], end="tensor", meta={"execution_times": {}, "route": list(worker.names)})
            return None

        def attack(number: int) -> int:
            path, body = bodies[number % len(bodies)]
            return httpx.post(f"{gateway.url}{path}", content=body, timeout=300).status_code

        def ask(_: int) -> tuple[int, int]:
            answer = httpx.post(f"{gateway.url}/v1/infer", json=step, timeout=300)
            return answer.status_code, len(answer.content)

        def small() -> int:
            body = {"prompt": "x", "max_tokens": 1}
            return httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=300).status_code

        watching = threads.submit(watch)
        with answering(worker, reply):
            assert small() == 200
            attacks = [threads.submit(attack, number) for number in range(200)]
            answers = [threads.submit(ask, number) for number in range(50)]
            served = Counter[int]()
            while not all(one.done() for one in attacks + answers):
                served[small()] += 1
                assert httpx.get(f"{gateway.url}/livez", timeout=300).status_code == 200
            refused, results_read = Counter(one.result() for one in attacks), [one.result() for one in answers]
        stop.set()
        watching.result()
        assert gateway.process.poll() is None
    assert set(served) == {200} and served[200] > 5, served
    assert set(refused) <= {400, 413, 503} and refused[413] and refused[400] and refused[503], refused
    whole = [size for status, size in results_read if status == 200]
    assert {status for status, _ in results_read} <= {200, 503} and len(whole) > 5, results_read
    assert len(set(whole)) <= len(whole) and min(whole) > TOKENS * VOCAB * 2 * 4 // 3, "they are whole"
    assert peak[0] < LIMIT, f"{peak[0] / MIB:.0f} MiB"


def _store(results: redis.Redis, keys: Keys, claimed: Claimed, result: bytes) -> None:
    store: Any = results
    store.set(keys.result(claimed.request_id), result, ex=60)
