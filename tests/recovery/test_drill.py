"""`blockrelay drill`: a short one finds nothing wrong, and what somebody plants it does find."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.client import resuming
from blockrelay_launcher.client.resuming import StreamEvent
from blockrelay_launcher.drill.command import run_drill
from blockrelay_launcher.drill.faults import CHANGES, KINDS
from blockrelay_launcher.drill.options import DrillOptions
from blockrelay_launcher.drill.parts.killer import Killer
from blockrelay_launcher.drill.system import DrilledSystem
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.systems.up_process import COMMAND, planned
from tests.support.waiting import wait_until

USERS = Path(__file__).parents[2] / "deploy" / "redis"
QUIET = DrillOptions(
    model=BUNDLED_MODEL, minutes=4 / 60, kill="", seed=3, requests=4, replicas=1, gateways=1, different_requests=8
)


def drill(*options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([*COMMAND, "drill", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def found_by(*options: str) -> dict[str, Any]:
    """The object of a drill in which nothing was wrong."""
    process = drill("--every", "1", "--requests", "6", "--json", *options)
    out, err = process.communicate(timeout=400)
    assert out, err
    found = json.loads(out)
    assert process.returncode == 0, (found, err)
    assert found["good"] and not found["wrong"] and found["accepted"] == found["completed"] > 0
    assert found["lost"] == found["mismatched"] == found["duplicated"] == found["refused"] == 0
    return found


def found_wrong(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The object of a drill in this process that went wrong; its logs stay for a look, and go now."""
    out = capsys.readouterr()
    kept = Path(out.err.strip().rpartition(" ")[2])
    assert (kept / "logs" / "worker-1.log").exists()
    shutil.rmtree(kept)
    return json.loads(out.out)


@pytest.mark.faults
def test_a_short_drill_over_all_roles_loses_nothing() -> None:
    found = found_by("--minutes", "0.2", "--stages", "2", "--replicas", "1", "--seed", "5")
    assert found["seed"] == 5 and sum(sum(by.values()) for by in found["faults"].values()) >= 6


@pytest.mark.faults
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in CHANGES])
def test_a_short_drill_of_one_kind_loses_nothing(kind: str) -> None:
    found = found_by("--minutes", "0.3", "--faults", kind)
    assert set(found["faults"]) == {kind} and sum(found["faults"][kind].values()) >= 6


@pytest.mark.faults
def test_requests_that_swap_to_a_damaged_folder_lose_nothing() -> None:
    found = found_by("--minutes", "0.5", "--faults", "kill,swap", "--kill", "worker")
    assert set(found["faults"]) <= {"kill", "swap"} and found["faults"]["kill"]


@pytest.mark.faults
def test_ranks_that_die_lose_nothing() -> None:
    found = found_by("--minutes", "0.5", "--faults", "kill,rank", "--kill", "worker")
    assert set(found["faults"]) == {"kill", "rank"} and found["faults"]["rank"]["worker"] >= 3


@pytest.mark.faults
def test_an_upgrade_under_faults_fails_nobody_and_every_answer_is_that_of_its_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLOCKRELAY_NUMERICS_WAIT_S", "2")  # of those whose workers are gone
    found = found_by("--minutes", "0.5", "--upgrade", "--seed", "11")
    assert found["faults"]["drain"]["worker"] >= 1
    assert {name.endswith("-next") for name in found["answers"] if "+" not in name} == {True, False}, found["answers"]


@pytest.mark.faults
def test_another_plan_in_the_middle_fails_nobody(tmp_path: Path) -> None:
    files: list[str] = []
    for name, blocks in (("uneven", "1-1,2-7"), ("other", "1-5,6-7")):
        files.append(str(planned(tmp_path / f"{name}.json", blocks)))
    found_by("--minutes", "0.5", "--plan", files[0], "--apply", files[1], "--seed", "12")


@pytest.mark.faults
def test_another_release_goes_on_with_the_data_of_one_and_fails_nobody() -> None:
    """Here it is the same one."""
    found_by("--minutes", "0.4", "--upgrade-from", sys.executable, "--kill", "worker,gateway", "--faults", "kill")


@pytest.mark.faults
def test_the_users_of_deploy_may_do_all_that_a_system_under_faults_does() -> None:
    found_by("--minutes", "0.3", "--users", str(USERS), "--stages", "2", "--replicas", "1")


@pytest.fixture
def raw_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    return write_reference_blocks(tmp_path / "raw", ReferenceModel(layers=3))


@pytest.mark.faults
def test_onnx_blocks_under_faults_lose_nothing_and_are_near_their_files(raw_blocks: Path) -> None:
    """They are answered by a device and by CPUs: no two of these compute the same bits."""
    options = ["--blocks", str(raw_blocks), "--gpu", "cpu", "--replicas", "1", "--kill", "worker,device,redis"]
    found = found_by("--minutes", "0.3", *options, "--longest-answer", "60", "--seed", "5")
    assert found["compared"] > 0 and found["only_whole"] > 0
    assert found["compared"] + found["only_whole"] == found["completed"] and not found["beyond_tolerance"]
    assert set(found["served"]) - {"cpu"}, "the device had a part"


class Saboteur:
    """Between gateway and client: what it does to the n-th stream, or to the n-th `greedy` one, once."""

    def __init__(self, *plans: str, greedy: bool = False) -> None:
        self.plans, self.real, self.greedy = list(plans), resuming.resuming_stream, greedy

    def __call__(self, *args: Any, **more: Any) -> Iterator[StreamEvent]:
        body: dict[str, Any] = args[2]
        meant = "n" not in body and "tools" not in body  # one loss is one, and nothing is read again
        meant = meant and (not self.greedy or (body["temperature"] == 0 and body["max_tokens"] > 1))
        plan = self.plans.pop() if self.plans and meant else ""
        last: StreamEvent | None = None
        for event in self.real(*args, **more):
            choices: list[dict[str, Any]] = event.data.get("choices") or []
            ids: list[int] = choices[0].get("token_ids") or [] if choices else []
            if plan == "mismatch" and ids:
                event, plan = replace(event, data={"choices": [{**choices[0], "token_ids": [ids[0] ^ 1]}]}), ""
            elif plan == "lose" and last is not None:
                raise resuming.Refused(404, "it is gone")
            elif plan == "duplicate" and last is not None:
                yield last
                plan = ""
            yield event
            last = event


def test_a_wrong_token_a_lost_request_and_an_event_that_comes_twice_make_it_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saboteur = Saboteur("mismatch", "lose", "duplicate")
    monkeypatch.setattr(resuming, "resuming_stream", saboteur)
    assert run_drill(QUIET, as_json=True) == 1
    found = found_wrong(capsys)
    assert not saboteur.plans and (found["mismatched"], found["lost"], found["duplicated"]) == (1, 1, 1)
    assert len(found["wrong"]) == 3 and found["completed"] == found["accepted"] - 2


def test_a_token_that_is_not_near_the_best_one_makes_a_drill_of_onnx_blocks_fail(
    raw_blocks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saboteur = Saboteur("mismatch", greedy=True)
    monkeypatch.setattr(resuming, "resuming_stream", saboteur)
    assert run_drill(replace(QUIET, blocks=raw_blocks), as_json=True) == 1
    found = found_wrong(capsys)
    assert not saboteur.plans and (found["beyond_tolerance"], found["mismatched"], found["lost"]) == (1, 0, 0)
    assert len(found["wrong"]) == 1 and "token 1 is behind the best one" in found["wrong"][0]
    assert found["completed"] == found["accepted"] - 1 == found["compared"] + found["only_whole"]


def test_a_process_that_nobody_of_the_drill_ended_makes_it_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def meddle(options: DrillOptions, system: DrilledSystem, *_: Any) -> list[Killer]:
        os.kill(system.pids("scheduler")[0], signal.SIGTERM)
        return []

    monkeypatch.setattr("blockrelay_launcher.drill.command._faults", meddle)
    assert run_drill(QUIET, as_json=True) == 1
    found = found_wrong(capsys)
    assert found["wrong"] == ["scheduler ended with code 0; starting it again"]
    assert found["accepted"] == found["completed"] > 0


def test_a_right_that_a_user_lacks_makes_it_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(USERS / "control.acl", tmp_path)
    rules = (USERS / "payload.acl").read_text()
    (tmp_path / "payload.acl").write_text(re.sub(r" \S*\{c0\}:page:\*", "", rules))
    assert run_drill(replace(QUIET, users=tmp_path), as_json=True) == 1
    found = found_wrong(capsys)
    assert any("redis-payload denied worker key" in line for line in found["wrong"])


def test_ctrl_c_ends_it_with_the_table_so_far() -> None:
    process = drill("--minutes", "5", "--replicas", "1", "--gateways", "1", "--kill", "")
    assert process.stderr is not None
    said = ""
    while "under load" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "mismatched" in out
    data = Path(said.strip().rpartition(" ")[2])
    assert data.name.startswith("blockrelay-drill-") and not data.exists(), "nothing is wrong, so nothing is kept"
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "nothing is left")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--kill", "worker,cook"], "worker, scheduler, gateway, redis"),
        (["--faults", "kill,flood"], "kill, stop, full, cut"),
        (["--faults", "full", "--kill", "worker"], "meets only redis"),
        (["--stages", "99"], "the model has 7 blocks"),
        (["--users", "/nowhere"], "control.acl"),
        (["--upgrade-from", "/nowhere/python"], "is not the Python of a release"),
        (["--upgrade-from", "/bin/false"], "is not the Python of a release"),
        (["--upgrade-from", sys.executable, "--upgrade"], "neither --users nor --upgrade"),
        (["--kill", "device"], "--kill device is for drills with --gpu or --blocks"),
        (["--sequential"], "--sequential is for --blocks"),
        (["--blocks", "/nowhere"], "there is no such folder"),
        (["--blocks", "/nowhere", "--model", "/nowhere"], "--blocks is instead of --model"),
    ],
)
def test_what_makes_no_sense_is_one_line(options: list[str], told: str) -> None:
    process = drill(*options)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 2 and not out and err.count("\n") == 1 and told in err
