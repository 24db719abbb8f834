"""`docker compose up` gives the system of `blockrelay up`: the same tokens, through kills of workers and of Redis."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_converter.convert import convert
from blockrelay_worker.kernels.libraries import ISAS
from tests.support.models.checkpoints import write_checkpoint
from tests.support.models.tiny_model import write_tiny_model
from tests.support.systems.compose_stack import ComposeStack, leftovers, mountable_copy, run
from tests.support.systems.system import Job, golden_tokens, make_jobs
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

PROMPT = "Tom has three apples. Anna gives him two more."
SEED = 5


@dataclass(frozen=True)
class Up:
    """A running stack and the model that it serves, as the host sees it."""

    stack: ComposeStack
    model: Path

    @property
    def name(self) -> str:
        return open_block_folder(self.model, blocks=[]).model.name

    def jobs(self, *, seed: int, tokens: int) -> list[Job]:
        vocab = open_block_folder(self.model, blocks=[]).model.vocab_size
        return make_jobs(20, seed=seed, vocab=vocab, tokens=tokens)


@pytest.fixture(scope="module", params=["bundled", "mounted"])
def up(request: pytest.FixtureRequest) -> Iterator[Up]:
    with tempfile.TemporaryDirectory(prefix="blockrelay-compose-") as folder:
        mounted = None
        if request.param == "mounted":
            mounted = mountable_copy(write_tiny_model(Path(folder) / "made"), Path(folder))
        stack = ComposeStack(mounted)
        stack.down()  # what an interrupted run may have left
        try:
            stack.build()
            stack.up()
            stack.wait_worker_ready(stack.containers("worker"))
            yield Up(stack, mounted or BUNDLED_MODEL)
            stack.compose("stop")
            codes = [stack.inspect(container)["State"]["ExitCode"] for container in stack.containers()]
            assert not any(codes), f"everything drains and ends by itself, but {codes}\n{stack.logs()}"
        finally:
            stack.down()
        assert not leftovers()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_the_openai_client_gets_the_tokens_of_generate_on_the_host(up: Up, stream: bool, sampled: bool) -> None:
    fields = {"temperature": 0.9, "top_p": 0.8, "top_k": 50, "seed": 7} if sampled else {"temperature": 0}
    options = [o for name, value in fields.items() for o in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "blockrelay_launcher", "generate", "--model", str(up.model), "--json"]
    command += ["--prompt", PROMPT, "--max-tokens", "40", "--ignore-eos", *options]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert len(found["tokens"]) == 40

    extra = {"return_token_ids": True, "ignore_eos": True, **fields}
    with OpenAI(base_url=f"{up.stack.url}/v1", api_key="none") as client:
        answer = client.completions.create(model=up.name, prompt=PROMPT, max_tokens=40, stream=stream, extra_body=extra)  # pyright: ignore[reportCallIssue, reportArgumentType]
        choices = [c for event in answer for c in event.choices] if stream else answer.choices  # pyright: ignore
    tokens = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
    assert (tokens, "".join(c.text for c in choices)) == (found["tokens"], found["text"])


def post(up: Up, job: Job, **more: object) -> dict[str, Any]:
    """The answer to one completion."""
    body = {
        "model": up.name,
        "prompt": list(job.prompt),
        "max_tokens": job.params.max_tokens,
        "temperature": job.params.temperature,
        "top_p": job.params.top_p,
        "ignore_eos": True,
        "return_token_ids": True,
        "seed": SEED,
        **more,
    }
    answer = httpx.post(f"{up.stack.url}/v1/completions", json=body, timeout=180)
    assert answer.is_success, answer.text
    return answer.json()


def complete(up: Up, job: Job) -> list[int]:
    return post(up, job)["choices"][0]["token_ids"]


def test_kill_9_of_each_worker_container_in_turn_under_twenty_requests_changes_no_token(up: Up) -> None:
    jobs = up.jobs(seed=41, tokens=120)
    golden = golden_tokens(open_block_folder(up.model), jobs, seed=SEED)
    over = threading.Event()
    completed: Counter[str] = Counter()

    def keep_asking(job: Job) -> None:
        while not over.is_set():
            assert complete(up, job) == golden[job.request_id], job
            completed[job.request_id] += 1

    workers = up.stack.containers("worker")
    assert len(workers) == 4
    with ThreadPoolExecutor(len(jobs)) as pool:
        clients = [pool.submit(keep_asking, job) for job in jobs]
        try:
            for worker_id in workers:
                wait_until(lambda: up.stack.running_requests() > 10, "most requests have tokens", timeout_s=90)
                up.stack.kill(worker_id)
                before = completed.total()
                wait_until(lambda: completed.total() > before + 20, "requests go on without it", timeout_s=90)  # noqa: B023
                up.stack.start(worker_id)
                up.stack.wait_worker_ready(workers)
        finally:
            over.set()
        for client in clients:
            client.result(120)
    assert set(completed) == {job.request_id for job in jobs}


def test_a_worker_that_crashes_is_started_again(up: Up) -> None:
    worker_id = up.stack.containers("worker")[0]
    crash = "import os; os.kill(int(open('/proc/1/task/1/children').read().split()[0]), 9)"
    before = up.stack.inspect(worker_id)["RestartCount"]
    up.stack.python(worker_id, crash)  # it is part of what it kills: no answer to expect
    wait_until(lambda: up.stack.inspect(worker_id)["RestartCount"] > before, "the engine starts it again", timeout_s=60)
    up.stack.wait_worker_ready([worker_id])


def test_kill_9_of_redis_costs_time_and_nothing_else(up: Up) -> None:
    jobs = up.jobs(seed=43, tokens=400)
    golden = golden_tokens(open_block_folder(up.model), jobs, seed=SEED)
    redis, payload = up.stack.containers("redis") + up.stack.containers("redis-payload")
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = {job.request_id: pool.submit(complete, up, job) for job in jobs}
        for server in (redis, payload):
            left = lambda: sum(not answer.done() for answer in answers.values())  # noqa: E731
            wait_until(lambda: 0 < left() == up.stack.running_requests(), "all that are left have tokens", timeout_s=90)  # noqa: B023
            up.stack.kill(server)
            up.stack.start(server)
        assert {request_id: answer.result(180) for request_id, answer in answers.items()} == golden
    wait_until(up.stack.is_ready, "ready again", timeout_s=60)


def test_what_was_accepted_is_finished_after_everything_was_killed_at_once(up: Up) -> None:
    jobs = up.jobs(seed=47, tokens=200)
    golden = golden_tokens(open_block_folder(up.model), jobs, seed=SEED)
    accepted = {job.request_id: f"{up.stack.url}/v1/requests/{post(up, job, background=True)['id']}" for job in jobs}
    up.stack.compose("kill")
    up.stack.up()
    for request_id, address in accepted.items():
        wait_until(lambda: httpx.get(address).json()["finish_reason"], "it is finished", timeout_s=180)  # noqa: B023
        assert httpx.get(address).json()["token_ids"] == golden[request_id]


@pytest.mark.parametrize(
    ("service", "absent", "present"),
    [
        ("gateway", ["onnxruntime", "highspy"], ["fastapi", "tokenizers"]),
        ("scheduler", ["onnxruntime", "fastapi", "tokenizers"], ["blockrelay_scheduler"]),
        ("worker", ["fastapi", "starlette", "uvicorn"], ["onnxruntime", "tokenizers"]),
    ],
)
def test_an_image_holds_what_its_service_needs_and_no_more(
    up: Up, service: str, absent: list[str], present: list[str]
) -> None:
    container = up.stack.containers(service)[0]
    for module in absent:
        done = up.stack.python(container, f"import {module}")
        assert "ModuleNotFoundError" in done.stderr, (module, done)
    for module in present:
        done = up.stack.python(container, f"import {module}")
        assert done.returncode == 0, done


def test_the_converter_image_writes_the_block_folder_that_the_host_writes(up: Up, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", seed=3)
    convert(tmp_path / "checkpoint", tmp_path / "expected", precision="w8a8", report=lambda *_: None, name="tiny")
    (tmp_path / "out").mkdir()
    up.stack.compose("build", "converter")
    mounts = ["--volume", f"{tmp_path / 'checkpoint'}:/in:ro", "--volume", f"{tmp_path / 'out'}:/out"]
    user = f"{os.getuid()}:{os.getgid()}"
    up.stack.compose("run", "--rm", "-T", "--user", user, *mounts, "converter", "/in", "/out/model", "--name", "tiny")
    assert contents(tmp_path / "out" / "model") == contents(tmp_path / "expected")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_worker_image_has_the_native_kernels(up: Up) -> None:
    code = "from blockrelay_worker.kernels import load_kernels; print(load_kernels(1).isa)"
    variant = up.stack.python(up.stack.containers("worker")[0], code).stdout.strip()
    assert variant in ISAS


def test_no_container_may_do_more_than_it_needs(up: Up) -> None:
    published: dict[str, list[str]] = {}
    for container in up.stack.containers():
        found = up.stack.inspect(container)
        service, host = found["Config"]["Labels"]["com.docker.compose.service"], found["HostConfig"]
        assert host["Memory"] > 0 and host["NanoCpus"] > 0, service
        assert host["Tmpfs"] and all("size=" in options for options in host["Tmpfs"].values()), service
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"], service
        assert "no-new-privileges:true" in host["SecurityOpt"], service
        assert service == "redis" or found["Config"]["User"] not in ("", "0", "root"), service
        for binding in host["PortBindings"] or {}:
            addresses = [b["HostIp"] for b in host["PortBindings"][binding]]
            published.setdefault(service, []).extend(addresses)
        if service != "redis-password":  # it has ended
            up.stack.wait_healthy(container)
    assert published == {"proxy": ["127.0.0.1"]}


def test_redis_asks_for_a_password_that_nobody_finds_from_outside(up: Up) -> None:
    for service in ("redis", "redis-payload"):
        (container,) = up.stack.containers(service)
        asked = subprocess.run(
            ["docker", "exec", container, "redis-cli", "ping"], capture_output=True, text=True, check=False
        )
        assert "NOAUTH" in asked.stdout, asked
    password = up.stack.python(
        up.stack.containers("scheduler")[0], "print(open('/run/redis-password/password').read().strip())"
    ).stdout.strip()
    assert len(password) == 64
    for container in up.stack.containers():
        assert password not in json.dumps(up.stack.inspect(container))
        if up.stack.inspect(container)["State"]["Running"]:
            assert password not in run("docker", "top", container, "-eo", "pid,args")
    assert password not in up.stack.compose("logs", "--no-color")
