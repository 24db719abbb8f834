"""The story of the ONNX block server: blocks are profiled, split over CPU and GPU, and served; where the GPU fails,
CPUs compute its blocks, and every answer says what happened.

Commands are real, and so are Redis, the workers and their kills. The GPU is ONNX Runtime's CPU provider in the process
of a device, which does what the test tells it to; `make software-gpu` has the same story on a Vulkan driver.
`test_source_blocks` and `test_source_failures` tell it of ONNX blocks that are served as they are.
"""

import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.sync.client import connect

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.settings import BUNDLED_MODEL
from blockrelay.text.tokenizer import Tokenizer
from tests.support.systems.source_story import Story, command, logits, tensor_request
from tests.support.systems.up_process import running_up
from tests.support.waiting import wait_until
from tests.support.worker.misbehaving_python import COMMANDED, misbehaving_python

BLOCKS = [f"block_{number}" for number in range(1, 8)]
#: What the split of the made profile gives to each.
ON_CPU, ON_GPU = BLOCKS[:3], BLOCKS[3:]
PLAN = dict.fromkeys(ON_CPU, "CPU") | dict.fromkeys(ON_GPU, "GPU")
#: CPUs round rows to 8 bits (w8a8), the device computes in float32: rows of logits differ by less than this part of
#: their length.
TOLERANCE = 0.05
PROMPT = "Once upon a time there was a fox who lived near the river."
CLIENTS, NEW = 20, 48


@pytest.fixture(scope="module", params=["cpu", pytest.param("webgpu:0", marks=pytest.mark.software_gpu)])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Profile, plan, up: the plan of a static split, on a CPU and a device."""
    gpu = str(request.param)
    folder = tmp_path_factory.mktemp("source")
    faults = folder / "faults"
    faults.mkdir()
    profile, plan = folder / "profiling_results.json", folder / "plan.json"
    profile.write_text(json.dumps({block: {"CPU": 0.1, "GPU": 0.1} for block in BLOCKS}))
    plan.write_text(command("plan", "--strategy", "static-split", "--profile", str(profile), "--json"))
    assert json.loads(plan.read_text())["plan"] == PLAN
    python = misbehaving_python(folder, COMMANDED, FAULTS=str(faults))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKRELAY_GPU_PYTHON", python)
        options = ("--plan", str(plan), "--gpu", gpu)
        with running_up(BUNDLED_MODEL, *options, data=folder / "data") as up:
            with httpx.Client(base_url=up.url, timeout=120) as client:
                story = Story(up=up, gpu=gpu, faults=faults, client=client, plan_in_force=PLAN, tolerance=TOLERANCE)
                wait_until(story.healthy, "the device has its blocks", timeout_s=300)  # shaders may be cold
                yield story
            assert up.stop() == 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    path = open_block_folder(BUNDLED_MODEL, blocks=[]).tokenizer_path
    assert path is not None
    return Tokenizer.from_file(path)


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> list[int]:
    """The prompt's."""
    return tokenizer.encode(PROMPT)


@pytest.fixture(scope="module")
def right(story: Story, tokens: list[int]) -> NDArray[np.float64]:
    """Logits of the prompt on the undisturbed system."""
    answer = story.step(tokens)
    assert answer["fallback_events"] == []
    return logits(answer)


@pytest.fixture(autouse=True)
def recovered(story: Story) -> Iterator[None]:
    """Each test begins on a system whose plan names the device."""
    story.wait_until_healthy()
    yield


def test_the_plan_in_force_is_the_split_on_the_device(story: Story) -> None:
    plan = story.plan()
    assert list(plan["plan"]) == BLOCKS and plan["plan"] == PLAN
    assert [(stage["blocks"], stage["class"]) for stage in plan["stages"]] == [("1-3", "CPU"), ("4-7", "GPU")]
    ready = story.logged("NODE_READY")
    on_gpu = [entry["data"] for entry in ready if entry["data"]["workers"]["gpu"]]
    assert {(data["first"], data["last"]) for data in on_gpu} == {(4, 7)}
    assert all(data["device"] == story.gpu for data in on_gpu)


def test_the_source_s_own_request_by_http_and_websocket(
    story: Story, tokens: list[int], right: NDArray[np.float64]
) -> None:
    by_http = story.step(tokens)
    with connect(story.up.url.replace("http", "ws")) as socket:  # the source's clients name no path
        socket.send(json.dumps(tensor_request(story.session(), tokens)))
        by_socket = json.loads(socket.recv(timeout=60))
    for answer in (by_http, by_socket):
        story.assert_close(logits(answer), right)
        stats = answer["execution_stats"]
        assert (stats["gpu_blocks_executed"], stats["cpu_blocks_executed"]) == (len(ON_GPU), len(ON_CPU))
        assert list(answer["execution_times"]) == BLOCKS and min(answer["execution_times"].values()) > 0
        assert sum(answer["execution_times"].values()) <= answer["total_pipeline_time"]
        assert answer["fallback_events"] == []


def test_twenty_clients_and_a_device_that_dies_twice(story: Story, tokenizer: Tokenizer) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(CLIENTS)]
    story.assert_went_on(story.answers_while_the_device_dies(prompts, NEW, times=2), NEW, tokenizer.encode)


def test_a_device_that_returns_what_is_not_finite(story: Story, tokens: list[int], right: NDArray[np.float64]) -> None:
    story.assert_a_cpu_computes_what_is_not_finite(tokens, right)


def test_a_device_that_is_out_of_memory(story: Story, tokens: list[int], right: NDArray[np.float64]) -> None:
    story.assert_a_cpu_computes_what_has_no_room(tokens, right)
