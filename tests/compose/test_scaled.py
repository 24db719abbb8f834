"""`docker compose up --scale gateway=3 --scale worker=4` with keys: one port, whatever gateways do."""

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from websockets.sync.client import connect

from blockrelay.auth.api_keys import Tenant, add_key, remove_key
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.settings import BUNDLED_MODEL
from tests.support.project import ROOT
from tests.support.systems.compose_stack import ComposeStack, compose_command, leftovers, run
from tests.support.systems.system import Job, golden_tokens, make_jobs
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

SEED = 5
RUNNING = "blockrelay_gateway_requests_running"
ACCEPTED_PROMPTS = "blockrelay_prompt_tokens_total"
ON_WORKERS = "blockrelay_num_requests_running"
#: Prints how many connections to a gateway's port are open, those of health checks too.
COUNT_CONNECTIONS = """
lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
print(sum(line[1].endswith(":1F40") and line[3] == "01" for line in lines))
"""
#: A key of Redis from before it had a password.
OLDER = ("older", "kept")
PROFILES = ("gpu", "webgpu", "observability", "tools")
ADDITIONS = sorted((ROOT / "deploy" / "compose").glob("*.yaml"))


class BrokeOff(Exception):
    """An answer that did not come, or not to its end."""


@dataclass
class Up:
    """The running stack, the folder of its keys and one of them."""

    stack: ComposeStack
    keys: Path
    key: str
    golden: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def headers(self, idempotency_key: str = "") -> dict[str, str]:
        more = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return {"Authorization": f"Bearer {self.key}"} | more

    def jobs(self, count: int, *, seed: int, tokens: int) -> list[Job]:
        """Jobs whose golden tokens are known from now on."""
        folder = open_block_folder(BUNDLED_MODEL)
        jobs = make_jobs(count, seed=seed, vocab=folder.model.vocab_size, tokens=tokens)
        self.golden |= golden_tokens(folder, jobs, seed=SEED)
        return jobs

    def running(self, gateways: list[str]) -> list[float]:
        """Requests that have a token, at each."""
        return [self.stack.gateway_sample(gateway, RUNNING) for gateway in gateways]

    def complete(self, job: Job, *, stream: bool, idempotency_key: str = "") -> list[int]:
        """The tokens of one POST through the port. Raises BrokeOff."""
        body = {
            "prompt": list(job.prompt),
            "max_tokens": job.params.max_tokens,
            "temperature": job.params.temperature,
            "top_p": job.params.top_p,
            "ignore_eos": True,
            "return_token_ids": True,
            "seed": SEED,
            "stream": stream,
        }
        url, headers = f"{self.stack.url}/v1/completions", self.headers(idempotency_key)
        tokens: list[int] = []
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=300) as answer:
                if answer.status_code >= 500:
                    raise BrokeOff(f"{answer.status_code}: {answer.read().decode()}")
                assert answer.is_success, answer.read()
                if not stream:
                    return json.loads(answer.read())["choices"][0]["token_ids"]
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        return tokens
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise BrokeOff(line)
                        tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
        except httpx.TransportError as error:
            raise BrokeOff(repr(error)) from error
        raise BrokeOff("a stream without an end")


def write_as_before_passwords(stack: ComposeStack) -> None:
    """A volume of Redis from a release whose Redis asked for nothing."""
    command = ["redis-server", "--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    older = stack.compose("run", "--detach", "--no-deps", "redis", *command).split()[-1]
    answers = lambda: "PONG" in run("docker", "exec", older, "redis-cli", "ping")  # noqa: E731
    wait_until(answers, "the older Redis answers", timeout_s=30)
    run("docker", "exec", older, "redis-cli", "set", *OLDER)
    run("docker", "stop", older)
    run("docker", "rm", "--volumes", older)


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with tempfile.TemporaryDirectory(prefix="blockrelay-compose-") as name:
        Path(name).chmod(0o755)
        keys = Path(name) / "keys.json"
        key = add_key(keys, Tenant(name="ada"))
        keys.chmod(0o644)
        stack = ComposeStack(None, ROOT / "deploy" / "compose" / "keys.yaml", KEYS_DIR=name)
        stack.down()
        try:
            stack.build()
            write_as_before_passwords(stack)
            stack.up(gateway=3, worker=4)
            for gateway in stack.containers("gateway"):
                stack.wait_healthy(gateway)
            yield Up(stack, keys, key)
        finally:
            stack.down()
        assert not leftovers()


def test_three_gateways_share_what_comes_through_one_port(up: Up) -> None:
    gateways = up.stack.containers("gateway")
    assert len(gateways) == 3
    jobs = up.jobs(12, seed=53, tokens=100)
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = {job.request_id: pool.submit(up.complete, job, stream=True) for job in jobs}
        wait_until(lambda: all(up.running(gateways)), "each has some", timeout_s=90)
        assert {request_id: answer.result() for request_id, answer in answers.items()} == {
            job.request_id: up.golden[job.request_id] for job in jobs
        }


def test_what_gateways_demand_and_refuse_passes_the_proxy(up: Up) -> None:
    url = f"{up.stack.url}/v1/completions"
    body: dict[str, Any] = {"prompt": [1, 5, 9], "max_tokens": 2, "temperature": 0}
    with httpx.Client(headers=up.headers(), timeout=60) as client:
        assert client.post(url, json=body).is_success
        assert client.post(url, json=body, headers={"Authorization": "Bearer br-none"}).status_code == 401
        assert (
            client.post(url, json=body, headers={"Host": "elsewhere.example"}).json()["error"]["code"] == "unknown_host"
        )
        assert client.post(url, json=body, headers={"x-long": "a" * 60_000}).is_success, "a head of 64 KiB"
        large = client.post(url, content=b'{"prompt": "' + b"a" * (9 << 20) + b'"}')
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
        fits = client.post(url, content=b'{"prompt": "' + b"a" * (7 << 20) + b'"}')
        assert (fits.status_code, fits.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert client.get(f"{up.stack.url}/readyz", params={"for": "accepting"}).json()["status"] == "ready"


def test_a_socket_goes_through_the_proxy_token_by_token(up: Up) -> None:
    with connect(up.stack.url.replace("http", "ws"), additional_headers=up.headers()) as socket:
        socket.send(
            json.dumps({"prompt": "Once", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True})
        )
        told = [json.loads(socket.recv(timeout=60))["status"] for _ in range(7)]
    assert told == ["accepted", *["token"] * 5, "success"]


def test_a_gateway_hears_of_clients_that_went_away(up: Up) -> None:
    """The gateway hears through the proxy of clients that leave, and ends their requests."""
    gateways = up.stack.containers("gateway")

    def leave(number: int) -> None:
        body = {"prompt": [1, 5, 9, number], "max_tokens": 1000, "temperature": 1.5, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            timeout = httpx.Timeout(60, read=0.5)
            httpx.post(f"{up.stack.url}/v1/completions", json=body, headers=up.headers(), timeout=timeout)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(8)))

    def is_left_alone() -> bool:
        connections = [int(up.stack.python(gateway, COUNT_CONNECTIONS).stdout) for gateway in gateways]
        assert up.stack.gateway_sample(gateways[0], ON_WORKERS) > 0, "they have ended by themselves"
        return not any(connections)

    wait_until(is_left_alone, "no connection to a gateway is left", timeout_s=60)


def test_kill_9_of_a_gateway_breaks_its_own_answers_only_and_loses_none(up: Up) -> None:
    gateways = up.stack.containers("gateway")
    jobs = up.jobs(24, seed=59, tokens=200)
    dead = threading.Event()
    broken: list[str] = []

    def insist(number: int, job: Job) -> list[int]:
        while True:
            late = dead.is_set()
            try:
                return up.complete(job, stream=number % 2 == 0, idempotency_key=job.request_id)
            except BrokeOff as error:
                assert not late, f"sent to a gateway that is gone: {error}"
                broken.append(job.request_id)

    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = {job.request_id: pool.submit(insist, number, job) for number, job in enumerate(jobs)}
        wait_until(lambda: all(up.running(gateways)), "each has some", timeout_s=90)
        up.stack.kill(gateways[0])
        dead.set()
        assert {request_id: answer.result(300) for request_id, answer in answers.items()} == {
            job.request_id: up.golden[job.request_id] for job in jobs
        }
    assert 0 < len(broken) < len(jobs)

    up.stack.start(gateways[0])
    up.stack.wait_healthy(gateways[0])

    def is_asked_again() -> bool:
        assert up.complete(jobs[0], stream=False) == up.golden[jobs[0].request_id]
        return up.stack.gateway_sample(gateways[0], ACCEPTED_PROMPTS) > 0

    wait_until(is_asked_again, "it gets requests again", timeout_s=120)


def test_a_roll_of_all_gateways_breaks_no_stream_and_refuses_nothing(up: Up) -> None:
    gateways = up.stack.containers("gateway")
    jobs = up.jobs(12, seed=61, tokens=150)
    over = threading.Event()
    answered = threading.Semaphore(0)

    def keep_asking(number: int, job: Job) -> None:
        while not over.is_set():
            assert up.complete(job, stream=number % 4 != 0) == up.golden[job.request_id]
            answered.release()

    with ThreadPoolExecutor(len(jobs)) as pool:
        clients = [pool.submit(keep_asking, number, job) for number, job in enumerate(jobs)]
        try:
            for gateway in gateways:
                wait_until(lambda: all(up.running(gateways)), "each has some", timeout_s=120)
                run("docker", "stop", gateway)
                assert up.stack.inspect(gateway)["State"]["ExitCode"] == 0
                up.stack.start(gateway)
                up.stack.wait_healthy(gateway)
        finally:
            over.set()
        for client in clients:
            client.result(180)
    assert sum(answered.acquire(blocking=False) for _ in range(10_000)) > len(jobs)


def test_keys_are_read_again_without_a_new_container(up: Up) -> None:
    begun = [up.stack.inspect(gateway)["State"]["StartedAt"] for gateway in up.stack.containers("gateway")]
    key = add_key(up.keys, Tenant(name="grace"))

    def statuses() -> set[int]:
        header = {"Authorization": f"Bearer {key}"}
        return {httpx.get(f"{up.stack.url}/v1/models", headers=header, timeout=30).status_code for _ in range(6)}

    wait_until(lambda: statuses() == {200}, "every gateway knows it", timeout_s=30)
    remove_key(up.keys, "grace")
    wait_until(lambda: statuses() == {401}, "no gateway knows it", timeout_s=30)
    assert [up.stack.inspect(gateway)["State"]["StartedAt"] for gateway in up.stack.containers("gateway")] == begun


def test_a_volume_from_before_there_was_a_password_is_served(up: Up) -> None:
    (redis,) = up.stack.containers("redis")
    ask = f"REDISCLI_AUTH=$(cat /run/redis-password/password) redis-cli get {OLDER[0]}"
    assert run("docker", "exec", redis, "sh", "-c", ask).strip() == OLDER[1]


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_takes_every_profile_with_all_additions(profile: str) -> None:
    files = [option for file in (ROOT / "compose.yaml", *ADDITIONS) for option in ("--file", str(file))]
    folders = {name: str(ROOT) for name in ("MODEL_DIR", "PLAN_DIR", "KEYS_DIR")}
    told = run(*compose_command(), *files, "--profile", profile, "config", env={**os.environ, **folders})
    profiles = {name: one.get("profiles", [profile]) for name, one in yaml.safe_load(told)["services"].items()}
    assert any(profile in one for one in profiles.values()) and "gateway" in profiles
