"""A plan that names a GPU runs on one: as answers, the plan and the logs of its workers say. And goes on without it.

The device is ONNX Runtime's own CPU provider, under the class gpu.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockrelay.redis.registry import read_plan
from tests.support.logs import entries
from tests.support.systems.system import StartSystem
from tests.support.systems.up_process import UpProcess, refusal, running_up
from tests.support.waiting import wait_until
from tests.support.worker.misbehaving_python import misbehaving_python

#: As a profile's devices are called, in a plan of a strategy.
ON_BOTH = {
    "stages": [
        {"blocks": "1-2", "devices": ["cpu:0"], "class": "CPU"},
        {"blocks": "3-5", "devices": ["gpu:0"], "class": "GPU"},
    ]
}
#: As the pipeline server has it.
BY_BLOCK = {f"block_{number}": "GPU" if number > 2 else "CPU" for number in range(1, 6)}
#: By it a static split has two blocks on the CPU and three on the GPU.
PROFILE = {f"block_{number}": {"CPU": 0.3, "GPU": 0.2} for number in range(1, 6)}


def written(folder: Path, plan: dict[str, Any]) -> str:
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    return str(path)


def classes(up: UpProcess) -> list[str]:
    """Of the blocks, in the order in which they are told."""
    plan: dict[str, str] = httpx.get(f"{up.url}/v1/plan", timeout=60).json()["plan"]
    assert list(plan) == [f"block_{number}" for number in range(1, 6)]
    return list(plan.values())


def infer(up: UpProcess, session: str) -> dict[str, Any]:
    return up.infer(session_id=session, step=1, input_tensors={"input_ids": [1, 2, 3]})["execution_stats"]


def events(data: Path, name: str) -> list[dict[str, Any]]:
    """Of the logs of all workers."""
    logs = sorted((data / "logs").glob("*worker*.log"))
    return [entry["data"] for log in logs for entry in entries(log, name)]


@pytest.mark.parametrize(
    ("options", "file"),
    [(["--strategy", "static-split", "--profile"], PROFILE), (["--plan"], BY_BLOCK)],
    ids=["a strategy", "a plan by blocks"],
)
def test_blocks_that_are_for_a_gpu_run_there(
    tiny_model: Path, tmp_path: Path, options: list[str], file: dict[str, Any]
) -> None:
    data = tmp_path / "data"
    with running_up(tiny_model, *options, written(tmp_path, file), "--gpu", "cpu", data=data) as up:
        wait_until(lambda: len(events(data, "NODE_READY")) == 3, "all workers are ready", timeout_s=60)
        wait_until(lambda: classes(up) == ["CPU", "CPU", "GPU", "GPU", "GPU"], "the plan says so")
        stats = infer(up, "both")
        assert (stats["gpu_blocks_executed"], stats["cpu_blocks_executed"]) == (3, 2)
        ready = events(data, "NODE_READY")
        assert Counter((event["first"], event["last"], bool(event["workers"]["gpu"])) for event in ready) == {
            (1, 2, False): 1,
            (3, 5, False): 1,  # it stands in
            (3, 5, True): 1,
        }


def test_a_device_that_fails_at_the_start_is_stood_in_for_and_comes_back(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both `blockrelay devices` and its process say so."""
    mended = tmp_path / "mended"
    device = misbehaving_python(tmp_path, DIES_AT="open", DIES_UNTIL=str(mended))
    found = {"id": "cpu", "kind": "cpu", "vendor": "", "problem": "it fails", "missing": False}
    python = tmp_path / "python-of-devices"
    listed = json.dumps({"devices": [found]})
    python.write_text(f"#!/bin/sh\ncase $3 in *offline.devices) echo '{listed}';; *) exec {device} \"$@\";; esac\n")
    python.chmod(0o755)
    monkeypatch.setenv("BLOCKRELAY_GPU_PYTHON", str(python))
    data = tmp_path / "data"
    with running_up(tiny_model, "--plan", written(tmp_path, ON_BOTH), "--gpu", "cpu", data=data) as up:
        assert classes(up) == ["CPU"] * 5
        assert infer(up, "alone")["gpu_blocks_executed"] == 0
        wait_until(lambda: len(events(data, "DEVICE_UNUSABLE")) > 1, "it is tried again")
        assert events(data, "DEVICE_UNUSABLE")[0]["device"] == "cpu"
        mended.touch()
        wait_until(lambda: classes(up) == ["CPU", "CPU", "GPU", "GPU", "GPU"], "the GPU has its blocks", timeout_s=60)


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        (ON_BOTH, ["--gpu", "cuda:7"], "--gpu cuda:7: "),
        ({"stages": [{"blocks": "1-5", "devices": ["cuda:7"]}]}, [], "the plan is for cuda:7: no such device here"),
        (dict.fromkeys(BY_BLOCK, "CPU"), ["--gpu", "cpu"], "--gpu cpu: no block of the plan uses it"),
        ({"block_1": "GPU", "block_3": "GPU"}, [], "block_2 is missing"),
    ],
)  # fmt: skip
def test_what_is_not_here_or_not_used_is_one_line(
    tiny_model: Path, tmp_path: Path, plan: dict[str, Any], options: list[str], said: str
) -> None:
    start = ("up", "--model", tiny_model, "--port", "0")
    assert said in refusal(*start, "--plan", written(tmp_path, plan), *options)


def test_a_worker_that_is_started_by_hand_is_found_too(start_system: StartSystem, tmp_path: Path) -> None:
    """It says its device alone; the plan has a class for it."""
    system = start_system(stages=2, scheduler_env={"BLOCKRELAY_PLAN": written(tmp_path, ON_BOTH)})
    system.start_worker(gpu="cpu")
    system.wait_ready(3)
    (gpu,) = [info for info in system.infos() if info.device == "gpu"]
    assert (gpu.device_id, gpu.stage) == ("cpu", 1)

    def planned() -> list[str]:
        plan = read_plan(system.client, system.keys, system.model_key)
        return list(plan.blocks.values()) if plan else []

    wait_until(lambda: planned() == ["CPU", "CPU", "GPU", "GPU", "GPU"], "the plan says so")
