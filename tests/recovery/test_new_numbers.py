"""A model is converted again, with other numbers: the folder before finishes what it has accepted, and none is lost."""

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import connect
from blockrelay.typed_command import typed_path
from blockrelay.up_file import read_running
from blockrelay_converter.convert import convert
from blockrelay_launcher.drill.system import command_line
from tests.support.models.checkpoints import write_checkpoint
from tests.support.systems.system import Job, golden_tokens, make_jobs
from tests.support.systems.up_process import UpProcess, refusal, running_up
from tests.support.waiting import wait_until

#: Requests at once, and the tokens of each: long enough that all are under way when everything is killed.
REQUESTS = 24
TOKENS = 300
SEED = 11


def _report(what: str, done: int, total: int) -> None:
    """The progress of a conversion."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two conversions of one checkpoint, as two releases make them: with other numbers, so as two models."""
    root = tmp_path_factory.mktemp("conversions")
    write_checkpoint(root / "checkpoint", seed=3)
    for basis in ("original", "rotated"):
        convert(root / "checkpoint", root / basis, precision="w8a8", report=_report, name="tiny", basis=basis)
    return root / "original", root / "rotated"


@pytest.fixture
def data() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="br-up-") as folder:
        yield Path(folder)


def accept(up: UpProcess, jobs: list[Job]) -> list[str]:
    """Have them accepted at the same time; their ids."""

    def send(job: Job) -> str:
        params = {"max_tokens": TOKENS, "temperature": job.params.temperature, "top_p": job.params.top_p, "seed": SEED}
        return own_id(up.complete(prompt=list(job.prompt), background=True, **params)["id"])

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(send, jobs))


def kill_everything(up: UpProcess, ids: list[str]) -> None:
    """With kill -9, in the middle of all of them."""
    assert up.data is not None
    running = read_running(up.data)
    keys, children = Keys(running.cell), up.children()
    with connect(running.redis_url) as client:
        wait_until(
            lambda: all(int(client.hget(keys.request(one), "committed") or 0) for one in ids),  # pyright: ignore
            "each has its first token",
        )
        assert client.zcard(keys.running) == len(ids), "and none its last"
    for pid in (up.process.pid, *children):
        os.kill(pid, signal.SIGKILL)
    up.process.wait()
    wait_until(lambda: not any(command_line(pid) for pid in children), "all have ended")


def contents(data: Path) -> dict[str, bytes]:
    """What lies in a data folder, but for its lock and the logs of its Redis servers."""
    files = (path for path in data.rglob("*") if path.is_file() and path.name != "lock" and path.parent.name != "logs")
    return {str(path.relative_to(data)): path.read_bytes() for path in files}


def test_the_folder_before_finishes_what_it_has_accepted_and_then_the_new_one_serves(
    folders: tuple[Path, Path], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = folders
    jobs = make_jobs(REQUESTS, seed=SEED, vocab=500, longest=40, tokens=TOKENS)
    golden = golden_tokens(open_block_folder(before), jobs, seed=SEED)
    assert golden != golden_tokens(open_block_folder(after), jobs, seed=SEED), "numbers are others"
    with monkeypatch.context() as slow:
        slow.setenv("BLOCKRELAY_INJECT_SPEED", "0.05")
        with running_up(before, data=data) as up:
            ids = accept(up, jobs)
            kill_everything(up, ids)

    held = contents(data)
    for _ in range(2):  # as often as it is tried
        line = refusal("up", "--model", after, "--port", "0", "--data", data)
        assert f"{REQUESTS} of {open_block_folder(before).model_key} ({before})" in line
        assert f"--data {typed_path(data)} --model {typed_path(before)}" in line and "or give another --data" in line
        grown = contents(data)
        assert grown.keys() == held.keys()
        changed = [name for name in held if not grown[name].startswith(held[name])]
        assert not changed, "Redis notes the keys whose time is over behind what is there, and nothing else happens"

    with running_up(before, data=data) as up:
        answers = {job.request_id: up.finished(one) for job, one in zip(jobs, ids, strict=True)}
        assert up.stop() == 0
    assert answers == golden, "0 lost, 0 different"

    with running_up(after, data=data) as up:
        (job, *_) = jobs
        params = {"max_tokens": TOKENS, "temperature": job.params.temperature, "top_p": job.params.top_p, "seed": SEED}
        served = up.tokens(prompt=list(job.prompt), **params)
        assert served == golden_tokens(open_block_folder(after), [job], seed=SEED)[job.request_id]
        assert up.stop() == 0
