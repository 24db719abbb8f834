"""A plan that `blockrelay plan` wrote is what `up` runs: uneven stages, its reasons shown, the same tokens."""

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.systems.up_process import UpProcess, planned, refusal, run_command, running_up
from tests.support.waiting import wait_until


def complete(up: UpProcess) -> list[int]:
    return up.tokens(max_tokens=200)


def test_requests_without_a_cache_run_beside_others_in_any_stages(tiny_model: Path, tmp_path: Path) -> None:
    """They keep no KV from token to token; their tokens are those of the others."""
    both = [(seed, use_cache) for seed in range(4) for use_cache in (True, False)]

    answers: list[list[list[int]]] = []
    for stages in ("1", "3"):
        with running_up(tiny_model, "--stages", stages, data=tmp_path / stages) as up, ThreadPoolExecutor(8) as pool:
            asked = [
                pool.submit(up.tokens, prompt=[1, 5 + seed, 9], temperature=1, seed=seed, use_cache=use_cache)
                for seed, use_cache in both
            ]
            answers.append([answer.result() for answer in asked])
    assert answers[0] == answers[1] and answers[0][::2] == answers[0][1::2]


def test_uneven_stages_serve_and_survive_a_worker(tiny_model: Path, tmp_path: Path) -> None:
    with running_up(tiny_model, data=tmp_path / "one") as up:
        alone = complete(up)
    plan = planned(tmp_path / "p.json", "1-1,2-4,5-5", tiny_model)
    with running_up(tiny_model, "--plan", str(plan), data=tmp_path / "d") as up:
        found = up.status()
        assert found["plan"]["split"] == "1-1,2-4,5-5"
        assert found["plan"]["reasons"][1] == (
            "stage 1 is block_2 to block_4, planned for cpu:0 (these boundaries were asked for): 1 CPU worker for it"
        )
        assert sorted((w["first"], w["last"]) for w in found["workers"]) == [(1, 1), (2, 4), (5, 5)]
        assert complete(up) == alone
        os.kill(up.pid_of("blockrelay_worker")[0], signal.SIGKILL)
        assert complete(up) == alone
        wait_until(lambda: up.status()["missing"] == [], "every stage has a worker again")


def test_another_plan_goes_on_with_the_data_of_the_first(tiny_model: Path, tmp_path: Path) -> None:
    answers: list[list[int]] = []
    for boundaries in ("1-2,3-5", "1-4,5-5"):
        file = planned(tmp_path / "p.json", boundaries, tiny_model)
        with running_up(tiny_model, "--plan", str(file), data=tmp_path / "d") as up:
            assert up.status()["plan"]["split"] == boundaries
            answers.append(complete(up))
    assert answers[0] == answers[1]


def plan_command(up: UpProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("plan", *arguments, "--data", up.data)


def applied(up: UpProcess, *arguments: str) -> dict[str, Any]:
    done = plan_command(up, *arguments, "--json")
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def history(up: UpProcess) -> list[tuple[str, str]]:
    found: list[dict[str, Any]] = json.loads(plan_command(up, "history", "--json").stdout)
    return [(entry["split"], entry["origin"]) for entry in found]


def test_another_plan_is_applied_and_taken_back_while_requests_run(tiny_model: Path, tmp_path: Path) -> None:
    """What runs goes on from its tokens; a scheduler or an `up` that comes back leaves the applied plan in force."""
    uneven = planned(tmp_path / "p.json", "1-1,2-5", tiny_model)
    with running_up(tiny_model, "--stages", "2", data=tmp_path / "d") as up:
        alone = complete(up)
        with ThreadPoolExecutor(8) as pool:
            before = up.status()["plan"]
            answers = [pool.submit(complete, up) for _ in range(8)]
            trial = applied(up, "apply", str(uneven), "--dry-run")
            assert (trial["before"], trial["split"], trial["changed"]) == ("1-3,4-5", "1-1,2-5", False)
            assert len(trial["moving"]) == 2 and up.status()["plan"] == before
            done = applied(up, "apply", str(uneven))
            assert done["changed"] and done["epoch"] > before["epoch"]
            answers += [pool.submit(complete, up) for _ in range(8)]
            assert [answer.result() for answer in answers] == [alone] * 16
        assert up.status()["plan"]["split"] == "1-1,2-5" and "applied by" in up.status()["plan"]["source"]
        assert not applied(up, "apply", str(uneven))["changed"], "it is the plan already"
        os.kill(up.pid_of("blockrelay_scheduler")[0], signal.SIGKILL)
        wait_until(lambda: complete(up) == alone and up.status()["missing"] == [], "all is there again")
        assert up.status()["plan"]["split"] == "1-1,2-5"
    with running_up(tiny_model, "--stages", "2", data=tmp_path / "d") as up:
        assert up.status()["plan"]["split"] == "1-1,2-5", "the same settings: nothing new was asked for"
        assert applied(up, "rollback")["split"] == "1-3,4-5"
        assert complete(up) == alone
        assert history(up) == [("1-3,4-5", "rollback"), ("1-1,2-5", "apply"), ("1-3,4-5", "settings")]
        assert applied(up, "rollback")["split"] == "1-1,2-5"
    with running_up(tiny_model, "--stages", "1", data=tmp_path / "d") as up:
        assert up.status()["plan"]["split"] == "1-5", "settings given to `up` win over the former ones"
        assert history(up)[:2] == [("1-5", "settings"), ("1-1,2-5", "rollback")]


def test_a_plan_that_cannot_be_applied_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with running_up(tiny_model, "--stages", "2", data=tmp_path / "d") as up:
        before = up.status()["plan"]
        (tmp_path / "short.json").write_text('{"stages": [{"blocks": "1-4"}]}')
        (tmp_path / "gpu.json").write_text(
            '{"stages": [{"blocks": "1-3"}, {"blocks": "4-5", "devices": ["webgpu:0"]}]}'
        )
        three = planned(tmp_path / "three.json", "1-1,2-4,5-5", tiny_model)
        wrong = {
            ("apply", str(tmp_path / "short.json")): "a plan of 4 blocks, but the model has 5",
            ("apply", str(tmp_path / "nothing")): "nothing: No such file or directory",
            ("apply", str(tmp_path / "gpu.json")): "stage 4-5 is for webgpu:0, which no worker has: none has a GPU",
            ("apply", str(three)): "the plan has 3 stages, and 2 workers are there: none would run 5-5",
            ("apply", str(three), "--model-key", "other"): "has no model other",
            ("rollback",): "there is no other plan in the history to go back to",
            ("rollback", "1-0"): "the history has no entry 1-0",
        }
        for arguments, line in wrong.items():
            done = plan_command(up, *arguments)
            assert done.returncode == 2 and done.stderr.count("\n") == 1 and line in done.stderr, done
        assert up.status()["plan"] == before and history(up) == [("1-3,4-5", "settings")]


@pytest.mark.parametrize(
    ("content", "options", "line"),
    [
        ("{}", [], "not what `blockrelay plan --json` writes"),
        ('{"stages": [{"blocks": "1-4"}]}', [], "a plan of 4 blocks, but the model has 5"),
        ('{"stages": [{"blocks": "1-5"}]}', ["--stages", "2"], "--stages is 2"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(
    tiny_model: Path, tmp_path: Path, content: str, options: list[str], line: str
) -> None:
    (tmp_path / "p.json").write_text(content)
    start = ("up", "--model", tiny_model, "--port", "0")
    assert line in refusal(*start, "--plan", tmp_path / "p.json", *options)
