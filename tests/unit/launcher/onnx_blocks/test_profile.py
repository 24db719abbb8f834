"""`blockrelay profile --blocks` and `plan --blocks` as people type them."""

import json
from pathlib import Path

import pytest

from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.systems.up_process import run_command

pytestmark = pytest.mark.onnx_blocks
BLOCKS = [f"block_{n}" for n in range(1, 3)]


def test_the_source_s_profile_is_measured_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKRELAY_CACHE_DIR", str(tmp_path / "cache"))
    write_reference_blocks(tmp_path / "my-blocks", ReferenceModel(layers=1))
    before = sorted((tmp_path / "my-blocks").iterdir())
    profiled = run_command("profile", "--blocks", "my-blocks", "--gpu", "cpu", "--form", "source", cwd=tmp_path)
    assert profiled.returncode == 0, profiled.stderr
    assert profiled.stdout == "profiling_results.json: my-blocks, fp16, 2 blocks on CPU and GPU\n"
    found = json.loads((tmp_path / "profiling_results.json").read_text())
    assert list(found) == BLOCKS and all(set(one) == {"CPU", "GPU"} for one in found.values())

    split = ("--strategy", "static-split", "--profile", "profiling_results.json", "--json")
    planned = run_command("plan", "--blocks", "my-blocks", *split, cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    times = [max(sum(found[b]["CPU"] for b in BLOCKS[:k]), sum(found[b]["GPU"] for b in BLOCKS[k:])) for k in range(3)]
    assert plan["k"] == times.index(min(times)) and plan["pipeline_time"] == pytest.approx(min(times))
    assert list(plan["plan"].values()) == plan["k"] * ["CPU"] + (2 - plan["k"]) * ["GPU"]
    assert sorted((tmp_path / "my-blocks").iterdir()) == before, "nothing is written into the folder"


def test_a_folder_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = run_command("profile", "--blocks", "empty", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "empty: has no ONNX files" in done.stderr and done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
