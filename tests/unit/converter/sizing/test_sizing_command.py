"""`blockrelay analyse --sizing`: what an operator asks and gets, and mistakes in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.planning.profile import BlockProfile, Profile
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_converter.analyse import run
from tests.support.models.checkpoints import write_checkpoint

ASKED = ("--sizing", "--context", "32768", "--requests-per-second", "20", "--precision", "w8a8")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run([*arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_an_operator_asks_and_gets_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["8b", *ASKED]) == 0
    shown = capsys.readouterr().out
    for wanted in ("weights", "KV of a token", "BLOCKRELAY_KV_BYTES", "workers", "gateways", "schedulers", "commands",
                   "maxmemory", "syncs", "fsync needed", "Rows between stages", "not profiled", "Xeon"):  # fmt: skip
        assert wanted in shown, wanted
    assert max(map(len, shown.splitlines())) <= 80


def test_every_figure_says_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "--model", "70b", *ASKED, "--stages", "4")
    sections = [found[name] for name in ("model", "processes", "control_redis", "disk", "between_stages")]
    for row in (row for section in sections for row in section.values()):
        assert row["source"] in found["sources"]
        assert row.get("value", row.get("low", 0)) <= row.get("value", row.get("high", 0))
    assert len([key for key in found["model"] if key.endswith("cpu_bytes")]) == 4


def test_a_slow_disk_delays_and_refuses_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    disk = said(capsys, "8b", *ASKED, "--tokens-per-second-per-worker", "1000")["disk"]
    fast, slow = disk["with_1_ms_first_token_s"]["value"], disk["with_10_ms_first_token_s"]["value"]
    assert slow == pytest.approx(10 * fast) and fast > 0.006, "three writes, two syncs each"
    assert disk["with_10_ms_writes_a_sync"]["value"] > 1 == disk["with_1_ms_writes_a_sync"]["value"]
    commits = [disk[f"with_{ms}_ms_commits_per_second"]["value"] for ms in (1, 10)]
    assert commits[0] == pytest.approx(10 * commits[1])


def test_a_block_folder_has_its_own_precision(capsys: pytest.CaptureFixture[str]) -> None:
    folder = open_block_folder(BUNDLED_MODEL, blocks=[])
    found = said(capsys, str(BUNDLED_MODEL), "--sizing")
    sizes = sum(folder.manifest.files[block.file].bytes for block in folder.manifest.blocks)
    assert (found["model"]["weight_bytes"]["value"], found["precision"]) == (sizes, folder.manifest.precision)
    other = said(capsys, str(BUNDLED_MODEL), "--sizing", "--precision", "fp32")
    assert other["model"]["weight_bytes"]["value"] > 1.5 * sizes


def test_a_config_without_weights_is_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "whole", seed=3)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_bytes((tmp_path / "whole/config.json").read_bytes())
    whole, config = (said(capsys, str(tmp_path / name), "--sizing") for name in ("whole", "config"))
    assert config["model"] == whole["model"]


def test_a_pace_that_is_given_leaves_no_range(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "8b", *ASKED, "--tokens-per-second-per-worker", "1000")
    assert found["processes"]["workers"] == {"value": 8, "unit": "", "source": "given"}
    assert "low" not in json.dumps(found["control_redis"])


def test_a_load_of_next_to_nothing_needs_a_system_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "1b", "--sizing", "--requests-per-second", "0.001", "--tokens-per-second-per-worker", "100")
    processes = found["processes"]
    for name, least in {"workers": 1, "requests_at_once": 1, "gateways": 2, "schedulers": 2, "cells": 1}.items():
        assert processes[name]["value"] == least, name
    assert found["control_redis"]["bytes"]["value"] > 10e6


def test_a_profile_says_how_fast_a_worker_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    times = BlockProfile(seconds={1: 0.001, 256: 0.256})  # a millisecond for each row
    blocks = {f"block_{index}": {"CPU": times, "GPU": BlockProfile(seconds={1: 1e-5})} for index in range(1, 34)}
    path = tmp_path / "profiling_results.json"
    path.write_text(Profile(model="8b", model_hash="0" * 16, machine="m", measured="now", blocks=blocks).encode())
    found = said(capsys, "8b", *ASKED, "--profile", str(path), "--device", "CPU", "--prompt", "100", "--new", "50")
    by_hand = 50 / (100 * 32 * 0.001 + 50 * 33 * 0.001)
    assert found["processes"]["tokens_per_second_per_route"]["value"] == pytest.approx(by_hand)
    assert found["processes"]["workers"]["source"] == "profiled"
    staged = said(capsys, "8b", *ASKED, "--profile", str(path), "--device", "CPU", "--stages", "3")
    assert staged["processes"]["workers"]["value"] % 3 == 0
    assert run(["8b", *ASKED, "--profile", str(path)]) == 2
    assert "choose one with --device" in capsys.readouterr().err
    assert run(["1b", *ASKED, "--profile", str(path), "--device", "CPU"]) == 2
    assert "profile this model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--sizing"], "give one model"),
        (["8b", "--model", "8b", "--sizing"], "give one model"),
        (["9b", "--sizing"], "neither a folder nor one of the shapes 1b, 8b, 70b"),
        (["8b", "--sizing", "--precision", "int3"], "none of w8a8"),
        (["8b", "--sizing", "--context", "200000"], "beyond the 131072"),
        (["8b", "--sizing", "--context", "0"], "--context must be above 0"),
        (["8b", "--sizing", "--requests-per-second", "-1"], "--requests-per-second must be above 0"),
        (["8b", "--sizing", "--requests-per-second", "nan"], "--requests-per-second must be above 0"),
        (["8b", "--sizing", "--context", "1000", "--prompt", "900", "--new", "200"], "beyond the context"),
        (["8b", "--sizing", "--stages", "40"], "stages"),
        (["8b", "--sizing", "--requests-at-once", "0"], "--requests-at-once must be above 0"),
        (["8b", "--sizing", "--cores", "0"], "--cores"),
        (["8b", "--sizing", "--cores", "4", "--tokens-per-second-per-worker", "5"], "say the same thing twice"),
        (["8b", "--sizing", "--tokens-per-second-per-worker", "0"], "--tokens-per-second-per-worker"),
        (["8b", "--sizing", "--profile", "/nowhere.json"], "blockrelay profile"),
        (["8b", "--sizing", "--device", "CPU"], "give --profile too"),
        (["8b", "--requests-per-second", "5"], "give --sizing too"),
        (["8b"], "is not a folder"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert line in shown.err and shown.err.count("\n") == 1 and shown.out == ""
