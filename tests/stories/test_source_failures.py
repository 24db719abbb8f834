"""The story of the ONNX block server, told of its own 33 ONNX files, when the device fails that has most of them: CPUs
run these files, and every answer says what happened.

The device is ONNX Runtime's CPU provider in the process of a device; `make software-gpu` has the story on a Vulkan
driver.
"""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.systems.source_blocks import BLOCKS, MODEL, PLANS, blocks_of, served, unsplit_model
from tests.support.systems.source_story import Story, command, logits

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
    story.wait_until_healthy()


def test_twenty_clients_and_a_device_that_dies(story: Story) -> None:
    answers = story.answers_while_the_device_dies([[number, 3, 5, 7] for number in range(CLIENTS)], NEW, times=1)
    story.assert_went_on(answers, NEW, list)


def test_a_block_of_the_device_that_is_not_finite(story: Story, tokens: list[int], right: NDArray[np.float64]) -> None:
    story.assert_a_cpu_computes_what_is_not_finite(tokens, right, "block_12")


def test_a_device_that_is_out_of_memory(story: Story, tokens: list[int], right: NDArray[np.float64]) -> None:
    story.assert_a_cpu_computes_what_has_no_room(tokens, right)
