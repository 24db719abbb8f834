"""`blockrelay plan` as a stranger uses it: what it prints, its JSON, and one line for every mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.host.cpu import machine_name
from blockrelay.planning.profile import BlockProfile, Hop, Profile
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_scheduler.plan_command.__main__ import run

MANIFEST = open_block_folder(BUNDLED_MODEL, blocks=[]).manifest
BLOCKS = MANIFEST.model.blocks


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A millisecond for each block on a CPU, half of one on a GPU."""
    times = {"CPU": BlockProfile(seconds={1: 0.001}), "GPU": BlockProfile(seconds={1: 0.0005})}
    path = tmp_path / "profile.json"
    path.write_text(
        Profile(
            model=MANIFEST.model.name, model_hash=MANIFEST.model_hash, machine=machine_name(1), measured="t",
            blocks={block.name: times for block in MANIFEST.blocks},
            hop={"redis": Hop(seconds=1e-4, seconds_per_byte=0)},
        ).encode()
    )  # fmt: skip
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    return shown.err


def test_the_plan_names_a_class_for_every_block(capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    found = said(capsys, "--profile", str(profile), "--objective", "latency")
    assert found["plan"] == {f"block_{n}": "GPU" for n in range(1, BLOCKS + 1)}
    assert found["predicted_tokens_per_second"]["1"] == pytest.approx(1 / (BLOCKS * 0.0005))
    assert found["estimated"] == []
    (stage,) = found["stages"]
    assert (stage["blocks"], stage["device"], stage["class"]) == (f"1-{BLOCKS}", "gpu:0", "GPU")
    assert stage["bytes"] == sum(MANIFEST.files[block.file].bytes for block in MANIFEST.blocks)


def test_static_split_says_k_and_its_time(capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    found = said(capsys, "--profile", str(profile), "--strategy", "static-split")
    k = found["k"]
    assert found["pipeline_time"] == pytest.approx(max(k * 0.001, (BLOCKS - k) * 0.0005))
    assert [found["plan"][f"block_{n}"] for n in (1, BLOCKS)] == ["CPU", "GPU"]


def test_without_a_profile_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--objective", "latency"]) == 0
    shown = capsys.readouterr().out
    assert "estimated, not profiled: cpu:0" in shown
    assert f"block_1 to block_{BLOCKS} on cpu:0:" in shown


def test_what_nobody_has_measured_is_a_range_and_the_remedy_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """bench has found 178 tokens/s on a machine for which the guesses alone make 3,505 or more."""
    assert run([]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "not profiled: run `" in shown and "blockrelay profile` and give --profile FILE" in shown
    assert "tokens/s, at least" in shown and "tokens/s, at most" in shown and "tokens/s │" not in shown
    ranges = said(capsys)["tokens_per_second_range"]
    for size, (least, most) in ranges.items():
        assert most >= 4 * least > 0, size
    least, most = ranges["1"]
    assert least < 178 < most


def test_of_devices_that_are_described_steps_are_not_known(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing is faster than its memory, and a step does more than read it."""
    described = {"id": "a", "class": "GPU", "host": "a", "bytes_per_second": 1e9}
    (tmp_path / "devices.json").write_text(json.dumps({"devices": [described]}))
    found = said(capsys, "--devices", str(tmp_path / "devices.json"))
    least, most = found["tokens_per_second_range"]["1"]
    assert least < most / 4 and most < found["predicted_tokens_per_second"]["1"]


def test_what_was_measured_is_one_figure(capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    measured = json.loads(profile.read_text()) | {"step": {"seconds": 0.002, "seconds_per_row": 0.0001}}
    profile.write_text(json.dumps(measured))
    assert said(capsys, "--profile", str(profile))["tokens_per_second_range"] == {}
    assert run(["--profile", str(profile)]) == 0
    shown = capsys.readouterr().out
    assert "not profiled" not in shown and "at least" not in shown


def test_what_is_wrong_with_a_plan_is_told_before_a_cell_is_looked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (empty := tmp_path / "empty.json").write_text("{}")
    for file, words in (("/nope", "/nope"), (str(empty), "empty.json: not what `blockrelay plan --json` writes")):
        line = refused(capsys, "apply", file, "--redis", f"unix://{tmp_path}/none.sock")
        assert words in line and "Redis" not in line


def test_what_if_shows_both_plans(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "what-if", "--add", "gpu:24GB:900GB/s", "--objective", "latency")
    assert found["today"]["stages"][0]["device"] == "cpu:0"
    assert found["then"]["stages"][0]["device"] == "gpu0"
    assert found["then"]["predicted_tokens_per_second"]["1"] > found["today"]["predicted_tokens_per_second"]["1"]
    assert found["then"]["estimated"] == ["gpu0"]


def test_what_if_another_precision_and_context(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "what-if", "--precision", "w4a8", "--context", "512")
    today, then = found["today"]["stages"][0], found["then"]["stages"][0]
    assert then["bytes"] < today["bytes"] and then["kv_bytes"] == today["kv_bytes"] // 2


def test_what_if_a_host_is_removed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    described = [
        {"id": name, "class": "GPU", "host": name, "bytes_per_second": speed}
        for name, speed in (("a", 1e9), ("b", 9e9))
    ]
    (tmp_path / "devices.json").write_text(json.dumps({"devices": described}))
    both = ["what-if", "--devices", str(tmp_path / "devices.json"), "--objective", "latency", "--remove", "b"]
    found = said(capsys, *both)
    assert [found[title]["stages"][0]["device"] for title in ("today", "then")] == ["b", "a"]
    assert run(both) == 0
    shown = capsys.readouterr().out
    assert shown.index("today:") < shown.index("then:") < shown.index("block_1 to block_7 on b:")


def test_the_shown_tables_fit_a_terminal(capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    assert run(["--profile", str(profile), "--strategy", "uniform"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert run(["what-if", "--profile", str(profile), "--strategy", "uniform"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--strategy", "best"], "there is no strategy best: there are auto"),
        (["--strategy", "custom", "--boundaries", "1-3,5-7"], "block_4 is in no part"),
        (["--strategy", "custom", "--boundaries", "1-"], "--boundaries takes blocks such as 1-3,4-9"),
        (["--context", "²"], "--context takes a number of tokens"),
        (["--strategy", "custom", "--boundaries", "²-3"], "--boundaries takes blocks"),
        (["--memory-limit", f"{'9' * 400}GB"], "is too large a number"),
        (["--context", "many"], "--context takes a number of tokens"),
        (["--context", "64k"], "--context 65536 is beyond the model's context"),
        (["--memory-limit", "1"], "--memory-limit: '1' is not a quantity"),
        (["--memory-limit", "1MB"], "the only device, cpu:0, has room for 1 MB"),
        (["--strategy", "uniform", "--memory-limit", "1MB"], "above the limit of a part"),
        (["--strategy", "custom", "--boundaries", "1-4,4-7"], "block_4 is in two parts"),
        (["--strategy", "uniform", "--targets", "npu"], "there is no device npu"),
        (["--boundaries", "1-3,4-7"], "strategy auto does not go by boundaries"),
        (["--requests", "9999999", "--context", "1"], "requests of 1 token would fit"),
        (["--strategy", "uniform", "--parts", "8"], "8 parts of 7 blocks"),
        (["--profile", "/nowhere.json"], "/nowhere.json: No such file or directory"),
        (["--devices", "/nowhere.json"], "/nowhere.json: No such file or directory"),
        (["--model", "/nowhere"], "/nowhere: no such block folder"),
        (["what-if", "--strategy", "custom", "--boundaries", "1-3"], "the plan of today: boundaries: block_4 is in no"),
        (["what-if", "--add", "gpu:1MB:9GB/s", "--strategy", "uniform"], "the plan of then: block_4 to block_7 need"),
        (["what-if", "--remove", "there"], "there is no host there: there are localhost"),
        (["what-if", "--add", "gpu"], "--add takes CLASS:MEMORY:BYTES/s"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    assert line in refused(capsys, *arguments)


def test_a_profile_of_another_machine_is_refused_unless_the_devices_are_named(
    capsys: pytest.CaptureFixture[str], profile: Path, tmp_path: Path
) -> None:
    profile.write_text(profile.read_text().replace(machine_name(1), machine_name(64)))
    shown = said(capsys, "--profile", str(profile))["profile"]
    assert shown == f"{machine_name(64)} at t", "threads are no other machine, and are told"
    profile.write_text(profile.read_text().replace(machine_name(64), "a mainframe, 64 threads"))
    line = refused(capsys, "--profile", str(profile))
    assert "measured on another machine (a mainframe, 64 threads) than this one" in line
    devices = tmp_path / "devices.json"
    devices.write_text('{"devices": [{"id": "main", "class": "CPU"}]}')
    found = said(capsys, "--profile", str(profile), "--devices", str(devices))
    assert (found["stages"][0]["device"], found["estimated"]) == ("main", [])


def test_a_profile_with_holes_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    holes = {block.name: {"GPU" if at == 2 else "CPU": 0.001} for at, block in enumerate(MANIFEST.blocks)}
    (tmp_path / "p.json").write_text(json.dumps(holes))
    line = refused(capsys, "--profile", str(tmp_path / "p.json"))
    assert "no class of devices was measured for every block (CPU lacks block_3, GPU lacks block_1)" in line


def test_what_nobody_measured_is_said(capsys: pytest.CaptureFixture[str], profile: Path, tmp_path: Path) -> None:
    found = said(capsys, "--profile", str(profile), "--strategy", "static-split")
    assert found["assumed"] == [
        "sampling and messages take no time",
        "CPU: a step of many rows takes as long as one of 1 row, the only ones measured",
        "GPU: a step of many rows takes as long as one of 1 row, the only ones measured",
    ]
    short = {block.name: {"CPU": 0.001, "GPU": 0.001} for block in MANIFEST.blocks}
    (tmp_path / "p.json").write_text(json.dumps(short))
    assert run(["--profile", str(tmp_path / "p.json"), "--strategy", "static-split"]) == 0
    assert "assumed: hops take 1.1 ms and their bytes, as they did on 2 cores" in capsys.readouterr().out


def test_a_profile_of_another_model_is_refused(capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    profile.write_text(profile.read_text().replace(MANIFEST.model_hash, "0" * 64))
    assert "measured with another model" in refused(capsys, "--profile", str(profile))
