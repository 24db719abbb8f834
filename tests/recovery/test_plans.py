"""A plan that `blockrelay plan` wrote is what `up` runs: uneven stages, its reasons shown, the same tokens."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models.tiny_model import write_tiny_model
from tests.support.systems.up_process import COMMAND, UpProcess, running_up
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def complete(url: str) -> list[int]:
    body = {"model": "tiny", "prompt": [1, 5, 9], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json={"return_token_ids": True, **body}, timeout=60)
    assert answer.is_success, answer.text
    return answer.json()["choices"][0]["token_ids"]


def planned(model: Path, path: Path, boundaries: str) -> Path:
    """A file of `blockrelay plan --json`."""
    argv = [*COMMAND, "plan", "--model", str(model), "--strategy", "custom", "--boundaries", boundaries, "--json"]
    path.write_bytes(subprocess.run(argv, capture_output=True, check=True).stdout)
    return path


def status(up: UpProcess) -> dict[str, Any]:
    done = subprocess.run([*COMMAND, "status", "--data", str(up.data), "--json"], capture_output=True, check=True)
    (found,) = json.loads(done.stdout)["models"].values()
    return found


def test_uneven_stages_serve_and_survive_a_worker(model: Path, tmp_path: Path) -> None:
    with running_up(model, data=tmp_path / "one") as up:
        alone = complete(up.url)
    plan = planned(model, tmp_path / "p.json", "1-1,2-4,5-5")
    with running_up(model, "--plan", str(plan), data=tmp_path / "d") as up:
        found = status(up)
        assert found["plan"]["split"] == "1-1,2-4,5-5"
        assert found["plan"]["reasons"][1] == (
            "stage 1 is block_2 to block_4, planned for cpu:0 (these boundaries were asked for): 1 CPU worker for it"
        )
        assert sorted((w["first"], w["last"]) for w in found["workers"]) == [(1, 1), (2, 4), (5, 5)]
        assert complete(up.url) == alone
        os.kill(up.pid_of("blockrelay_worker")[0], signal.SIGKILL)
        assert complete(up.url) == alone
        wait_until(lambda: status(up)["missing"] == [], "every stage has a worker again")


def test_another_plan_goes_on_with_the_data_of_the_first(model: Path, tmp_path: Path) -> None:
    answers: list[list[int]] = []
    for boundaries in ("1-2,3-5", "1-4,5-5"):
        file = planned(model, tmp_path / "p.json", boundaries)
        with running_up(model, "--plan", str(file), data=tmp_path / "d") as up:
            assert status(up)["plan"]["split"] == boundaries
            answers.append(complete(up.url))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("content", "options", "line"),
    [
        ("{}", [], "not what `blockrelay plan --json` writes"),
        ('{"stages": [{"blocks": "1-4"}]}', [], "a plan of 4 blocks, but the model has 5"),
        ('{"stages": [{"blocks": "1-5"}]}', ["--stages", "2"], "--stages is 2"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(
    model: Path, tmp_path: Path, content: str, options: list[str], line: str
) -> None:
    (tmp_path / "p.json").write_text(content)
    argv = [*COMMAND, "up", "--model", str(model), "--port", "0", "--plan", str(tmp_path / "p.json"), *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and line in done.stderr, done
