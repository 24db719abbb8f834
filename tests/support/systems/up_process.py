"""`blockrelay up` as a process, for tests."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import RedisTrouble
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import EndEntry, TokenEntry
from blockrelay.redis.client import connect
from blockrelay.redis.registry import read_workers
from blockrelay.settings import BUNDLED_MODEL
from blockrelay.up_file import read_running
from blockrelay_launcher.drill.system import children_of, command_line, environment_of
from blockrelay_launcher.supervisor.shared_page_folder import open_page_folder
from tests.support.cell import read_log
from tests.support.leaks import ownerless_keys, settled
from tests.support.waiting import wait_until

COMMAND = [sys.executable, "-m", "blockrelay_launcher"]


def run_command(*arguments: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run `blockrelay ...` to its end."""
    argv = [*COMMAND, *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False, **options)


def preferring(folder: Path) -> dict[str, str]:
    """An environment in which modules of this folder come first."""
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def interrupted(*arguments: object, when: Callable[[], object], **options: Any) -> tuple[int, str, str]:
    """Press Ctrl-C in `blockrelay ...` at that moment; its exit code, stdout and stderr."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=pipe, stderr=pipe, text=True, **options) as process:
        wait_until(when, "it is in the middle", timeout_s=60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def refusal(*arguments: object, **options: Any) -> str:
    """The one line with which a command says no, code 2."""
    done = run_command(*arguments, **options)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout, done
    return done.stderr


def planned(path: Path, boundaries: str, model: Path = BUNDLED_MODEL) -> Path:
    """Write a plan of these stages, as `blockrelay plan --json` prints it."""
    done = run_command("plan", "--model", model, "--strategy", "custom", "--boundaries", boundaries, "--json")
    assert done.returncode == 0, done
    path.write_text(done.stdout)
    return path


class UpProcess:
    """A running `up`; `url` is its gateway's, "" where it has none. `data` is where it keeps what was accepted. Waits
    until it is ready."""

    def __init__(self, process: "subprocess.Popen[str]", data: Path | None) -> None:
        self.process, self.data = process, data
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n" or line.startswith("ready http://127.0.0.1:"), f"not ready but {line!r}"
        self.url = line.partition(" ")[2].partition(" ")[0].strip()

    def children(self) -> dict[int, str]:
        """pid -> command line of every process that it has started and that still runs."""
        return {pid: command_line(pid) for pid in children_of(self.process.pid)}

    def pid_of(self, what: str) -> list[int]:
        """Children whose command line contains `what`, lowest pid first."""
        return sorted(pid for pid, command in self.children().items() if what in command)

    def pid_of_successor(self) -> int:
        """The process of a worker that has a successor, as soon as there is one."""
        assert self.data is not None
        running, found = read_running(self.data), list[int]()
        model, keys = open_block_folder(running.model, blocks=[]).model_key, Keys(running.cell)
        with connect(running.redis_url) as client:

            def look() -> bool:
                found.extend(worker.pid for worker in read_workers(client, keys, model) if worker.succeeds)
                return bool(found)

            wait_until(look, "a worker has a successor", poll_s=0.001)
        return found[0]

    def complete(self, **fields: Any) -> dict[str, Any]:
        """The answer to a completion, by default a greedy one of 40 tokens."""
        body = {"prompt": [1, 5, 9], "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body | fields, timeout=120)
        assert answer.is_success, answer.text
        return answer.json()

    def tokens(self, **fields: Any) -> list[int]:
        """The tokens of such a completion."""
        return self.complete(**fields)["choices"][0]["token_ids"]

    def infer(self, **fields: Any) -> dict[str, Any]:
        """The answer to a tensor step."""
        answer = httpx.post(f"{self.url}/v1/infer", json=fields, timeout=120).json()
        assert answer["status"] == "success", answer
        return answer

    def status(self) -> dict[str, Any]:
        """What `blockrelay status --json` says of its only model."""
        (found,) = json.loads(run_command("status", "--data", self.data, "--json").stdout)["models"].values()
        return found

    def finished(self, request_id: str) -> list[int]:
        """The tokens of a request that it was left with, when nothing runs any more."""
        assert self.data is not None
        running = read_running(self.data)
        with connect(running.redis_url) as client:
            keys = Keys(running.cell)
            wait_until(lambda: not client.zcard(keys.running), "the accepted request is finished")
            *tokens, end = read_log(client, keys, request_id)
        assert isinstance(end, EndEntry) and end.reason == "length"
        return [entry.token for entry in tokens if isinstance(entry, TokenEntry)]

    def redis_urls(self) -> list[str]:
        """Of the servers that its services use, as one of these was told."""
        for pid in self.pid_of("-m blockrelay_"):
            told = environment_of(pid)
            names = ("BLOCKRELAY_REDIS_URL", "BLOCKRELAY_PAYLOAD_REDIS_URL")
            return [told[name] for name in names if name in told]
        return []

    def assert_nothing_is_ownerless(self) -> None:
        """No key in its Redis servers belongs to nothing that lives. One that does not answer says nothing."""
        for url in self.redis_urls():
            with connect(url) as client, contextlib.suppress(RedisTrouble):
                left = settled(lambda of=client: ownerless_keys(of))
                assert not left, "\n".join(map(str, left))

    def stop(self, number: int = signal.SIGTERM, *, timeout_s: float = 40) -> int:
        """Send a signal and wait; the exit code."""
        self.assert_nothing_is_ownerless()
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


@contextmanager
def running_up(model: Path | None, *options: str, data: Path | None = None) -> Iterator[UpProcess]:
    """`blockrelay up` on a free port, ready; None: the options say what it serves.

    Ends properly behind a test that has not stopped it, and dies with one that failed.
    """
    served = () if model is None else ("--model", str(model))
    with starting_up(*served, "--port", "0", *options, data=data) as process:
        up = UpProcess(process, data)
        yield up
        if process.poll() is None:
            assert up.stop() == 0


@contextmanager
def starting_up(*options: str, data: Path | None = None) -> "Iterator[subprocess.Popen[str]]":
    """`blockrelay up`, not ready yet; dies behind a test that has not ended it."""
    argv = [*COMMAND, "up", *options]
    if data is not None:
        argv += ["--data", str(data)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ.copy()) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
                with open_page_folder():  # removes that of the dead, which would be one more failure and hide the first
                    pass
