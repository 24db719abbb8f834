"""Steps of a session over two stages with a device find the KV of the steps before, and are right where it has gone.

The device is ONNX Runtime's own CPU provider, under the class gpu.
"""

import os
import signal
from typing import Any

import httpx
import numpy as np

from blockrelay.protocol.tensors import decode_tensor
from tests.support.scraping import sampled
from tests.support.systems.device_processes import child_of
from tests.support.systems.gpu_systems import on_gpu, stages_shown, with_gpu
from tests.support.systems.system import StartSystem, System, assert_nothing_is_held, scrape
from tests.support.waiting import wait_until

TOKENS = [(7 * position + 3) % 500 for position in range(120)]
#: CPUs round rows to 8 bits, the device computes in float32: logits differ by less than this part of their length.
TOLERANCE = 0.05


def infer(url: str, tokens: list[int], **more: Any) -> dict[str, Any]:
    body = {"input_tensors": {"input_ids": [tokens]}, **more}
    answer = httpx.post(f"{url}/v1/infer", json=body, timeout=60).json()
    assert answer["status"] == "success", answer
    return answer


def found(answer: dict[str, Any]) -> int:
    return int(answer["execution_stats"]["cached_tokens"])


def assert_equal(answer: dict[str, Any], right: dict[str, Any]) -> None:
    """The same logits, but for what devices and CPUs differ by."""
    one, other = (
        decode_tensor(each["outputs"]["logits"], param="logits", max_elements=1 << 20).astype(np.float64).ravel()
        for each in (answer, right)
    )
    assert np.linalg.norm(one - other) < TOLERANCE * np.linalg.norm(other)


def rows_computed(system: System) -> float:
    """Of prompts, by the first stages that there are."""
    first = [info for info in system.infos() if info.stage == 0]
    return sum(sampled(scrape(info), "blockrelay_worker_prompt_tokens_total") for info in first)


def lose_device(system: System) -> None:
    former = {info.id for info in on_gpu(system)}
    os.kill(child_of(system.workers[-1].pid), signal.SIGKILL)
    wait_until(lambda: former.isdisjoint(info.id for info in system.infos()), "the device is lost")


def split(start_system: StartSystem, devices: str) -> tuple[System, str]:
    """Two stages on these, a CPU beside the device, and a gateway's URL."""
    system = with_gpu(start_system, scheduler_env={"BLOCKRELAY_STAGE_DEVICES": devices})
    url, _ = system.start_gateway()
    return system, url


def test_steps_find_what_those_before_have_left_and_are_right_when_the_device_has_gone(
    start_system: StartSystem,
) -> None:
    system, url = split(start_system, "gpu,cpu")
    right = {end: infer(url, TOKENS[:end]) for end in (40, 70, 71, 100)}
    before = rows_computed(system)
    first = infer(url, TOKENS[:40], session_id="s", step=1)
    second = infer(url, TOKENS[40:70], session_id="s", step=2)
    third = infer(url, TOKENS[70:71], session_id="s", step=3)
    assert [found(answer) for answer in (first, second, third)] == [0, 32, 64]
    assert rows_computed(system) - before == 40 + 38 + 7
    assert third["execution_stats"]["gpu_blocks_executed"] > 0
    for answer, end in ((first, 40), (second, 70), (third, 71)):
        assert_equal(answer, right[end])
    assert found(infer(url, TOKENS[:70], session_id="t", step=1)) == 0, "nobody else finds it"
    assert found(infer(url, TOKENS[:70])) == 0

    lose_device(system)
    fourth = infer(url, TOKENS[71:100], session_id="s", step=4)
    assert found(fourth) == 0, "its stand-in has nothing of the session, so the other stage begins too"
    assert_equal(fourth, right[100])
    assert_nothing_is_held(system)


def test_a_step_begins_where_the_stage_is_that_has_least(start_system: StartSystem) -> None:
    """The device comes back with nothing, and says so when rows come that lie behind what the CPU before it has."""
    system, url = split(start_system, "cpu,gpu")
    right = infer(url, TOKENS[:80])
    assert found(infer(url, TOKENS[:40], session_id="s", step=1)) == 0
    assert found(infer(url, TOKENS[40:60], session_id="s", step=2)) == 32
    lose_device(system)
    system.wait_ready(3)
    wait_until(lambda: stages_shown(system) == 1, "the device serves again")
    third = infer(url, TOKENS[60:80], session_id="s", step=3)
    assert found(third) == 0 and system.reruns() == {"missing_pages": 1}
    assert third["execution_stats"]["gpu_blocks_executed"] > 0
    assert_equal(third, right)
    assert found(infer(url, TOKENS[80:81], session_id="s", step=4)) == 80, "all stages have it again"
    assert_nothing_is_held(system)
