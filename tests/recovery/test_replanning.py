"""A stage becomes slow while requests run, and the blocks leave it: nothing is lost, and every token stays the same."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.checkpoint import write_checkpoint
from bench.scenarios.slow_stage import limited_cpu
from blockrelay_converter.convert import convert
from tests.support.systems.up_process import UpProcess, run_command, running_up
from tests.support.waiting import wait_until

STREAMS, TOKENS = 4, 60


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """A process that gets a fifth of a core: by a control group, or where none may be made by being stopped."""
    try:
        with limited_cpu(pid, 0.2):
            yield
    except PermissionError:
        over = threading.Event()

        def stop_and_go() -> None:
            while not over.wait(0.005):
                os.kill(pid, signal.SIGSTOP)
                over.wait(0.02)
                os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=stop_and_go)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of eight layers that are large enough for most of a step's time to be theirs."""
    root = tmp_path_factory.mktemp("large")
    write_checkpoint("llama75m", root / "checkpoint", quick=True)
    convert(root / "checkpoint", root / "model", precision="w8a8", report=lambda *_: None, name="large")
    return root / "model"


def ask(up: UpProcess, seed: int) -> list[int]:
    return up.tokens(prompt=[1, 5 + seed % 200, 9], max_tokens=TOKENS, temperature=1, seed=seed)


def history(up: UpProcess) -> list[tuple[str, str]]:
    """The stages and the origin of each plan, newest first."""
    done = run_command("plan", "history", "--data", up.data, "--json")
    assert done.returncode == 0, done
    return [(entry["split"], entry["origin"]) for entry in json.loads(done.stdout)]


def blocks_of(split: str, stage: int) -> int:
    first, last = split.split(",")[stage].split("-")
    return int(last) - int(first) + 1


def test_blocks_leave_a_stage_that_became_slow(
    large_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKRELAY_REPLAN_AFTER_S", "2")
    with running_up(large_model, "--stages", "3", data=tmp_path / "d") as up:
        alone = [ask(up, seed) for seed in range(8)]
        assert history(up) == [("1-3,4-6,7-9", "settings")]
        slow = next(worker["pid"] for worker in up.status()["workers"] if worker["stage"] == 1)
        over, answers = threading.Event(), list[tuple[int, list[int]]]()

        def ask_on(offset: int) -> None:
            seed = offset
            while not over.is_set():
                answers.append((seed % 8, ask(up, seed % 8)))
                seed += STREAMS

        with ThreadPoolExecutor(STREAMS) as pool, slowed(slow):
            asking = [pool.submit(ask_on, offset) for offset in range(STREAMS)]
            try:
                wait_until(lambda: history(up)[0][1] == "measured", "borders move", timeout_s=90)
                split = history(up)[0][0]
                assert blocks_of(split, 1) < 3, "away from the slow stage"
                wait_until(
                    lambda: {f"{w['first']}-{w['last']}" for w in up.status()["workers"]} == set(split.split(",")),
                    "the better plan serves alone",
                    timeout_s=60,
                )
            finally:
                over.set()
            for one in asking:
                one.result()
        assert all(tokens == alone[seed] for seed, tokens in answers) and len(answers) > STREAMS
        plan = up.status()["plan"]
        assert plan["source"].startswith("measured by") and "instead of" in plan["reasons"][0]
