"""The story of the ONNX block server, told of its own 33 ONNX files: a plan puts each of them on the CPU or on a
device, which run them as they are, and every answer is that of the model they were cut from.

The device is ONNX Runtime's CPU provider in the process of a device; `make software-gpu` has the story on a Vulkan
driver.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.tensors import decode_tensor
from tests.support.models.reference_blocks import ReferenceModel
from tests.support.models.run_onnx import requests, whole
from tests.support.models.whole_decoders import optimum_decoder, saved
from tests.support.systems.device_processes import children_of
from tests.support.systems.source_story import Story, command, logits
from tests.support.systems.up_process import running_up
from tests.support.waiting import wait_until
from tests.support.worker.misbehaving_python import COMMANDED, misbehaving_python

MODEL = ReferenceModel()
BLOCKS = [f"block_{number}" for number in range(1, MODEL.layers + 2)]
#: How far a row of logits may be from the unsplit model's, as a part of its length.
TOLERANCES = {"float32": 1e-5, "float16": 2e-2}
#: What the static split of the made profile gives to each.
ON_CPU, ON_GPU = BLOCKS[:10], BLOCKS[10:]
CLIENTS, NEW = 20, 24


def classes(*runs: tuple[str, int]) -> dict[str, str]:
    """A plan in the source's form: so many consecutive blocks for each class."""
    names = [name for name, count in runs for _ in range(count)]
    return dict(zip(BLOCKS, names, strict=True))


#: By the number of their stages.
PLANS: Mapping[int, Mapping[str, str]] = {
    1: classes(("GPU", 33)),
    2: classes(("CPU", 10), ("GPU", 23)),
    5: classes(("GPU", 6), ("CPU", 7), ("GPU", 7), ("CPU", 7), ("GPU", 6)),
    33: {block: "GPU" if number % 2 else "CPU" for number, block in enumerate(BLOCKS, 1)},
}


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The model in one file, by its floats."""
    folder = tmp_path_factory.mktemp("unsplit")
    return {
        kind: saved(optimum_decoder(MODEL, float32=kind == "float32"), folder / f"{kind}.onnx") for kind in TOLERANCES
    }


@pytest.fixture(scope="module")
def blocks(unsplit: Mapping[str, Path]) -> Mapping[str, Path]:
    """Its 33 files, by its floats."""
    for path in unsplit.values():
        command("split", str(path), str(path.with_suffix("")))
    return {kind: path.with_suffix("") for kind, path in unsplit.items()}


@contextmanager
def served(
    folder: Path, blocks: Path, plan: Mapping[str, str], *options: str, gpu: str = "cpu", kind: str = "float32"
) -> Iterator[Story]:
    """The blocks, as the plan says, on CPUs and a device that obeys files."""
    faults = folder / "faults"
    faults.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan))
    python = misbehaving_python(folder, COMMANDED, FAULTS=str(faults))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKRELAY_GPU_PYTHON", python)
        patch.setenv("BLOCKRELAY_CACHE_DIR", str(folder / "cache"))
        given = ("--blocks", str(blocks), "--plan", str(folder / "plan.json"), "--gpu", gpu, *options)
        with running_up(None, *given, data=folder / "data") as up:
            with httpx.Client(base_url=up.url, timeout=120) as client:
                story = Story(
                    up=up, gpu=gpu, faults=faults, client=client, plan_in_force=plan, tolerance=TOLERANCES[kind]
                )
                wait_until(story.healthy, "the device has its blocks", timeout_s=120)
                yield story
            assert up.stop() == 0


def tensor_step(session: str, number: int, request: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """A step of the source's form, with the bytes of its tensors."""
    tensors = {
        name: {"_tensor_": True, "dtype": "int64", "shape": list(value.shape), "data": value.tolist()}
        for name, value in request.items()
    }
    return {"session_id": session, "step": number, "input_tensors": tensors, "logits": "all"}


def assert_equals_the_unsplit(story: Story, unsplit: Path, steps: tuple[int, ...], batch: int) -> None:
    """Every row of logits of every step of one session."""
    right, session, vocabulary = whole(unsplit), story.session(), MODEL.vocabulary
    for number, request in enumerate(requests(steps, batch=batch, vocabulary=vocabulary, seed=batch), 1):
        answer = story.client.post("/v1/infer", json=tensor_step(session, number, request)).json()
        assert answer["status"] == "success", answer
        found = decode_tensor(answer["outputs"]["logits"], param="logits", max_elements=1 << 24)
        wanted = right.step(dict(request))["logits"]
        assert found.shape == wanted.shape
        assert_rounded(found.reshape(-1, vocabulary), wanted.reshape(-1, vocabulary), story.tolerance)
        assert list(answer["execution_times"]) == BLOCKS and answer["fallback_events"] == []
        stats = answer["execution_stats"]
        counts = stats["gpu_blocks_executed"], stats["cpu_blocks_executed"]
        assert counts == (len(story.on("GPU")), len(story.on("CPU")))


def assert_rounded(found: NDArray[Any], right: NDArray[Any], tolerance: float) -> None:
    """Rows of logits, in float16 as answers have them, are what rows become there that are no further from the right
    ones than the tolerance, a part of each row's length."""
    assert found.dtype == np.float16 and np.isfinite(found).all()
    right = right.astype(np.float64)
    allowed = tolerance * np.linalg.norm(right, axis=1, keepdims=True)
    least, most = ((right + way * allowed).astype(np.float16) for way in (-1, 1))
    assert ((least <= found) & (found <= most)).all()


@pytest.mark.parametrize("stages", PLANS)
def test_a_plan_of_any_number_of_stages_gives_the_unsplit_models_logits(
    tmp_path: Path, blocks: Mapping[str, Path], unsplit: Mapping[str, Path], stages: int
) -> None:
    """A session of three steps behind 16 positions and more, and a batch of five."""
    with served(tmp_path, blocks["float32"], PLANS[stages]) as story:
        assert len(story.plan()["stages"]) == stages
        assert_equals_the_unsplit(story, unsplit["float32"], (24, 1, 7), 1)
        assert_equals_the_unsplit(story, unsplit["float32"], (10, 1), 5)


def test_blocks_in_float16(tmp_path: Path, blocks: Mapping[str, Path], unsplit: Mapping[str, Path]) -> None:
    with served(tmp_path, blocks["float16"], PLANS[5], kind="float16") as story:
        assert_equals_the_unsplit(story, unsplit["float16"], (24, 1), 1)
        assert_equals_the_unsplit(story, unsplit["float16"], (10, 1), 5)


def test_sequential_workers_run_alternating_blocks(
    tmp_path: Path, blocks: Mapping[str, Path], unsplit: Mapping[str, Path]
) -> None:
    """As the source's {"block_1": "GPU", "block_2": "CPU", "block_3": "GPU"}: few sessions for all stages together."""
    with served(tmp_path, blocks["float32"], PLANS[33], "--sequential", "--max-warm-sessions", "3") as story:
        assert_equals_the_unsplit(story, unsplit["float32"], (24, 1), 1)
        before = sessions_made(story)
        story.step([1, 2, 3])
        for device, made in sessions_made(story).items():
            assert made - before[device] >= len(story.on(device)) - 3, "one budget for all stages of a device"


def sessions_made(story: Story) -> dict[str, float]:
    """By class, those of all its workers since they began."""
    told = json.loads(command("status", "--data", str(story.up.data), "--json"))
    (model,) = told["models"].values()
    found = dict.fromkeys(("CPU", "GPU"), 0.0)
    for worker in model["workers"]:
        found[worker["device"].upper()] += worker["totals"]["sessions"]["made"]
    return found


def test_a_session_finds_what_the_stages_have_computed(tmp_path: Path, blocks: Mapping[str, Path]) -> None:
    with served(tmp_path, blocks["float32"], PLANS[5]) as story:
        session, tokens = story.session(), [number % MODEL.vocabulary for number in range(100)]
        story.step(tokens, session=session)
        answer = story.step([5], session=session, number=2, past=len(tokens))
        assert answer["status"] == "success"
        assert answer["execution_stats"]["cached_tokens"] == 96, "whole pages of the step before"


@pytest.fixture(scope="module", params=["cpu", pytest.param("webgpu:0", marks=pytest.mark.software_gpu)])
def story(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, blocks: Mapping[str, Path]
) -> Iterator[Story]:
    """A static split, by the command that makes it."""
    folder = tmp_path_factory.mktemp("source-blocks")
    profile = folder / "profiling_results.json"
    profile.write_text(json.dumps({block: {"CPU": 0.1, "GPU": 0.1 * 10 / 23} for block in BLOCKS}))
    given = ("--strategy", "static-split", "--profile", str(profile), "--json")
    plan = json.loads(command("plan", "--blocks", str(blocks["float32"]), *given))["plan"]
    assert plan == PLANS[2]
    with served(folder, blocks["float32"], plan, gpu=str(request.param)) as story:
        story.tolerance = 1e-3 if story.gpu != "cpu" else 1e-5
        yield story


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return [number * 7 % MODEL.vocabulary for number in range(40)]


@pytest.fixture(scope="module")
def right(story: Story, tokens: list[int]) -> NDArray[np.float64]:
    """Logits of the prompt on the undisturbed system."""
    answer = story.step(tokens)
    assert answer["fallback_events"] == []
    return logits(answer)


@pytest.fixture
def recovered(story: Story) -> None:
    """The test begins on a system whose plan names the device."""
    wait_until(story.healthy, "the plan has come back to the device", timeout_s=60)


@pytest.mark.usefixtures("recovered")
def test_twenty_clients_and_a_device_that_dies(story: Story) -> None:
    """In the middle of their answers, and again while it loads: CPUs do its part until it is there."""
    former, worker, begun = story.device(), story.gpu_worker(), threading.Semaphore(0)
    with ThreadPoolExecutor(CLIENTS) as pool, story.fault("load"):
        asked = [pool.submit(story.streamed, [number, 3, 5, 7], NEW, begun) for number in range(CLIENTS)]
        for _ in range(CLIENTS):
            assert begun.acquire(timeout=60)
        os.kill(former, signal.SIGKILL)
        wait_until(lambda: set(story.plan()["plan"].values()) == {"CPU"}, "the plan has gone to the CPU")
        wait_until(lambda: [c for c in children_of(worker) if c != former], "the device comes back, and loads")
        answers = [one.result(timeout=120) for one in asked]
        assert set(story.plan()["plan"].values()) == {"CPU"}, "a device that loads serves nobody"
    moved = 0
    for answer in answers:
        new = answer["outputs"]["token_ids"]
        assert len(new) == NEW
        story.assert_greedy(answer["prompt"], new)
        events = answer["fallback_events"]
        logged = story.logged("BLOCK_EXECUTION_FALLBACK", request_id=own_id(answer["request_id"]))
        assert len(logged) == len(events) == answer["execution_stats"]["total_fallbacks"] <= 1
        for event in events:
            moved += 1
            assert (event["block_id"], event["blocks"]) == (ON_GPU[0], ON_GPU)
            assert (event["from"], event["to"], event["success"]) == ("GPU", "CPU", True)
            assert (event["reason"], event["error_code"]) == ("gpu_device_lost", "INTERNAL")
    assert moved >= CLIENTS // 2, "most were on the device when it died"


@pytest.mark.usefixtures("recovered")
def test_a_block_of_the_device_that_is_not_finite(story: Story, tokens: list[int], right: NDArray[np.float64]) -> None:
    device, session = story.device(), story.session()
    (story.faults / "nan").write_text("block_12")
    answer = story.step(tokens, session=session)
    assert not (story.faults / "nan").exists(), "the device has had it"
    story.assert_close(logits(answer), right)
    assert_left_the_device(story, answer, session, "gpu_wrong_numbers", "INTERNAL")
    again = story.step(tokens)
    assert again["fallback_events"] == [] and story.device() == device, "its canary was right: it serves on"


@pytest.mark.usefixtures("recovered")
def test_a_device_that_is_out_of_memory(story: Story, tokens: list[int], right: NDArray[np.float64]) -> None:
    device, session = story.device(), story.session()
    with story.fault("oom"):
        answer = story.step(tokens, session=session)
    story.assert_close(logits(answer), right)
    assert_left_the_device(story, answer, session, "gpu_memory_error", "OOM")
    again = story.step(tokens)
    assert again["fallback_events"] == [] and story.device() == device


def assert_left_the_device(story: Story, answer: dict[str, Any], session: str, reason: str, code: str) -> None:
    """The stage of the device fell back before it had computed anything."""
    story.assert_fell_back(answer, session, ON_GPU, reason, code)
    stats = answer["execution_stats"]
    assert stats["gpu_blocks_executed"] == 0 and stats["cpu_blocks_executed"] >= len(BLOCKS)
