"""The story of the ONNX block server, told of its own 33 ONNX files, when the device fails that has most of them: CPUs
run these files, and every answer says what happened.

The device is ONNX Runtime's CPU provider in the process of a device; `make software-gpu` has the story on a Vulkan
driver.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.protocol.encoding.request_ids import own_id
from tests.support.systems.device_processes import children_of
from tests.support.systems.source_blocks import BLOCKS, MODEL, PLANS, blocks_of, served, unsplit_model
from tests.support.systems.source_story import Story, command, logits
from tests.support.waiting import wait_until

#: What the static split of the made profile gives to the device.
ON_GPU = BLOCKS[10:]
CLIENTS, NEW = 20, 24


@pytest.fixture(scope="module", params=["cpu", pytest.param("webgpu:0", marks=pytest.mark.software_gpu)])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A static split, by the command that makes it."""
    folder = tmp_path_factory.mktemp("source-blocks")
    blocks = blocks_of(unsplit_model(folder, "float32"))
    profile = folder / "profiling_results.json"
    profile.write_text(json.dumps({block: {"CPU": 0.1, "GPU": 0.1 * 10 / 23} for block in BLOCKS}))
    given = ("--strategy", "static-split", "--profile", str(profile), "--json")
    plan = json.loads(command("plan", "--blocks", str(blocks), *given))["plan"]
    assert plan == PLANS[2]
    with served(folder, blocks, plan, gpu=str(request.param)) as story:
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


@pytest.fixture(autouse=True)
def recovered(story: Story) -> None:
    """The test begins on a system whose plan names the device."""
    wait_until(story.healthy, "the plan has come back to the device", timeout_s=60)


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


def test_a_block_of_the_device_that_is_not_finite(story: Story, tokens: list[int], right: NDArray[np.float64]) -> None:
    device, session = story.device(), story.session()
    (story.faults / "nan").write_text("block_12")
    answer = story.step(tokens, session=session)
    assert not (story.faults / "nan").exists(), "the device has had it"
    story.assert_close(logits(answer), right)
    assert_left_the_device(story, answer, session, "gpu_wrong_numbers", "INTERNAL")
    again = story.step(tokens)
    assert again["fallback_events"] == [] and story.device() == device, "its canary was right: it serves on"


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
