"""A request that kills every worker which computes it: it ends with an error, everybody else's tokens stay the same."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.transitions import calls
from blockrelay.settings import BUNDLED_MODEL
from tests.support.beside import beside
from tests.support.systems.system import Job, StartSystem, System, assert_nothing_is_held, golden_tokens, make_jobs
from tests.support.systems.up_process import UpProcess, run_command, running_up

#: No other request of these tests has or generates it.
DEADLY = 499
FAILPOINT = f"worker.before_compute:kill#{DEADLY}"


def mates(system: System, tokens: int) -> tuple[list[Job], dict[str, list[int]]]:
    """Requests that never see the deadly token, and their solo runs."""
    jobs = make_jobs(30, seed=31, vocab=DEADLY, tokens=tokens)
    golden = golden_tokens(system.block_folder, jobs)
    harmless = [job for job in jobs if DEADLY not in golden[job.request_id]]
    assert len(harmless) > 9
    return harmless, {job.request_id: golden[job.request_id] for job in harmless}


def poison() -> Job:
    prompt = (*range(3, 40), DEADLY, 7)
    return Job(request_id="req-poison", prompt=prompt, params=SamplingParams(max_tokens=9, temperature=0.0))


@contextmanager
def replaced_when_dead(system: System, **env: str) -> Iterator[None]:
    """Plays the launcher: a dead worker is reported at once and replaced by one with `env`."""

    def watch(over: threading.Event) -> None:
        seen: set[int] = set()
        while not over.wait(0.02):
            for process in list(system.workers):
                if process.pid not in seen and process.poll() is not None:
                    seen.add(process.pid)
                    for worker_id in [w.id for w in system.infos() if w.pid == process.pid]:
                        system.scripts.run(calls.dead(worker_id, silent_s=0))
                    system.start_worker(**env)

    with beside(watch):
        yield


@pytest.mark.faults
def test_the_second_stage_dies_of_poison_and_its_batch_mates_do_not_notice(start_system: StartSystem) -> None:
    system = start_system(stages=2)
    harmless, golden = mates(system, tokens=200)
    victim = system.pid_of(1)
    os.kill(victim, signal.SIGKILL)
    with replaced_when_dead(system, failpoint=FAILPOINT):
        system.accept_all([*harmless[:3], poison(), *harmless[3:]])
        system.wait_all([poison(), *harmless])
    end = system.log("req-poison")[1]
    assert end is not None and end.reason == "error" and end.meta["code"] == "poison"
    assert system.results(harmless) == golden
    ((_, letter),) = system.client.xrange(system.keys.dead_letters)  # pyright: ignore
    assert letter[b"request"] == b"req-poison"  # pyright: ignore
    died = [worker for worker in system.workers if worker.poll() == -signal.SIGKILL and worker.pid != victim]
    assert len(died) in (7, 8), "three times beside others (of which one may be the victim's), five times alone"
    assert_nothing_is_held(system)


def command(*argv: str, data: Path, code: int = 0, **env: str) -> str:
    """What `blockrelay dead-letters ...` prints."""
    done = run_command("dead-letters", *argv, "--data", data, env={**os.environ, **env})
    assert done.returncode == code, done
    return done.stdout + done.stderr


def ask(up: UpProcess, prompt: list[int]) -> list[int]:
    return up.tokens(prompt=prompt, max_tokens=150)


def test_people_find_it_run_it_again_and_remove_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `blockrelay up`: others get their tokens, its client an error event, people the request."""
    monkeypatch.setenv("BLOCKRELAY_FAILPOINT", FAILPOINT)
    body: dict[str, Any] = {"prompt": [5, 6, DEADLY, 8], "max_tokens": 5, "temperature": 0, "stream": True}
    others = [[n, n + 1, n + 2] for n in range(40, 46)]
    with running_up(BUNDLED_MODEL, data=tmp_path) as up, ThreadPoolExecutor(len(others)) as clients:
        assert "no dead letters" in command("list", data=tmp_path)
        beside = [clients.submit(ask, up, prompt) for prompt in others]
        with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=90) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        assert "ended its worker 8 times" in events[-1]["error"]["message"]
        tokens = [answer.result() for answer in beside]
        assert tokens == [ask(up, prompt) for prompt in others]
        (letter,) = json.loads(command("list", "--json", data=tmp_path))
        assert (letter["why"], letter["prompt_tokens"], letter["committed"]) == ("poison", 4, 0)
        assert letter["id"] in command("list", data=tmp_path)
        name = letter["id"].replace("req-", "cmpl-")
        assert "prompt" not in json.loads(command("show", name, data=tmp_path))
        assert json.loads(command("show", name, "--prompt", data=tmp_path))["prompt"] == body["prompt"]
        assert "signal 9" in command("replay", name, data=tmp_path, code=1)
        told = command("replay", name, data=tmp_path, BLOCKRELAY_FAILPOINT="")
        assert "then it ended (" in told and "nothing failed here" in told
        assert "tokens 0 to 0: cpu " in told, "what ran it then"
        assert "no dead letter of req-x" in command("show", "req-x", data=tmp_path, code=2)
        assert "--all" in command("remove", data=tmp_path, code=2)
        assert "1 removed" in command("remove", name, data=tmp_path)
        assert "no dead letters" in command("list", data=tmp_path)
        assert up.stop() == 0
