"""`docker compose --profile webgpu up`: a GPU worker in its container, on a Vulkan driver that computes on CPUs."""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI
from websockets.sync.client import connect

from blockrelay.protocol.constants import PAGE_TOKENS
from tests.support.project import ROOT
from tests.support.systems.compose_stack import ComposeStack, leftovers
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

#: Many pages of KV, so that computing it again is told from going on behind it.
PROMPT = " ".join(["Tom has three apples and Anna gives him two more."] * 25)
BLOCKS = [f"block_{number}" for number in range(1, 8)]
#: Ends the process of the device, by its command line.
KILL_DEVICE = """
import os, pathlib, signal
device = b"blockrelay_worker.execution.process"
found = [int(one.name) for one in pathlib.Path("/proc").iterdir() if one.name.isdigit()
         and device in (one / "cmdline").read_bytes().split(bytes(1))]
(pid,) = found
os.kill(pid, signal.SIGKILL)
"""
#: A CPU computes at most what the GPU has not yet left in the page store: its last page and one on the way.
MOST_ROWS_AGAIN = 2 * PAGE_TOKENS


def software_driver(folder: Path) -> Path | None:
    """SwiftShader in a folder that containers may read; None where it is not to be had."""
    look = "import os; print(os.environ['VK_DRIVER_FILES'])"
    told = subprocess.run(
        [ROOT / ".ci" / "software-gpu", "python3", "-c", look], capture_output=True, text=True, check=True
    ).stdout
    if told.startswith("NOT TESTED"):
        return None
    found = Path(told.strip()).parent
    for name in ("libvk_swiftshader.so", "vk_swiftshader_icd.json"):
        shutil.copy(found / name, folder / name)
        (folder / name).chmod(0o644)
    folder.chmod(0o755)
    return folder


def write_plan(folder: Path) -> Path:
    """The folder, with what `blockrelay plan --strategy static-split` makes of blocks that are as fast on the GPU."""
    profile = folder / "profiling_results.json"
    profile.write_text(json.dumps({block: {"CPU": 0.1, "GPU": 0.1} for block in BLOCKS}))
    argv = [sys.executable, "-m", "blockrelay_launcher", "plan", "--strategy", "static-split", "--json"]
    done = subprocess.run([*argv, "--profile", str(profile)], capture_output=True, text=True, check=True)
    (folder / "plan.json").write_text(done.stdout)
    return folder


def tensor_request(session: str) -> dict[str, Any]:
    """The block server's own request."""
    return {
        "session_id": session,
        "step": 1,
        "input_tensors": {
            "input_ids": {"_tensor_": True, "dtype": "int64", "shape": [1, 4], "data": [1, 15, 7, 9]},
            "attention_mask": {"_tensor_": True, "data": [1, 1, 1, 1]},
            "position_ids": {"_tensor_": True, "data": [0, 1, 2, 3]},
        },
    }


@pytest.fixture(scope="module")
def stack() -> Iterator[ComposeStack]:
    with tempfile.TemporaryDirectory(prefix="blockrelay-compose-") as name:
        driver = software_driver(Path(name))
        if driver is None:
            pytest.skip("NOT TESTED: SwiftShader is neither here nor to be had")
        software = {
            "build": {"network": "host"},  # it gets packages of Debian
            "environment": {
                "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1",
                "VK_DRIVER_FILES": "/driver/vk_swiftshader_icd.json",
            },
            "volumes": [f"{driver}:/driver:ro"],
        }
        more = driver / "software.yaml"
        more.write_text(yaml.safe_dump({"services": {"worker-webgpu": software}}))
        plan = ROOT / "deploy" / "compose" / "plan.yaml"
        environment = {
            "GPU_DEVICE": "/dev/null",
            "BLOCKRELAY_WORKERS": "2",
            "PLAN_DIR": str(write_plan(driver)),
            "BLOCKRELAY_PLAN": "/plan/plan.json",
            "BLOCKRELAY_STAGES": "1",  # as many as the plan has
        }
        stack = ComposeStack(None, plan, more, profile="webgpu", **environment)
        stack.down()
        try:
            stack.build()
            stack.up()
            stack.wait_worker_ready(stack.containers("worker"))
            wait_for_the_device(stack)
            yield stack
        finally:
            stack.down()
        assert not leftovers()


def wait_for_the_device(stack: ComposeStack) -> None:
    """A driver that computes on CPUs compiles a model's shaders for minutes on a busy machine."""
    stack.wait_worker_ready(stack.containers("worker-webgpu"), timeout_s=600)
    there = lambda: httpx.get(f"{stack.url}/v1/plan").json()["plan"]["block_4"] == "GPU"  # noqa: E731
    wait_until(there, "the plan has the device")


def test_the_source_s_request_goes_through_both_by_http_and_websocket(stack: ComposeStack) -> None:
    """The plan of a static split: blocks 1 to 3 on CPUs, the others on the device."""
    wait_for_the_device(stack)
    plan = httpx.get(f"{stack.url}/v1/plan").json()["plan"]
    assert list(plan.items()) == [(block, "CPU" if number < 3 else "GPU") for number, block in enumerate(BLOCKS)]
    by_http = httpx.post(f"{stack.url}/v1/infer", json=tensor_request("chat_001"), timeout=120).json()
    with connect(stack.url.replace("http", "ws")) as socket:
        socket.send(json.dumps(tensor_request("chat_002")))
        by_socket = json.loads(socket.recv(timeout=120))
    for answer in (by_http, by_socket):
        assert answer["status"] == "success" and list(answer["execution_times"]) == BLOCKS
        assert answer["outputs"]["logits"]["shape"] == [1, 1, 2048] and answer["fallback_events"] == []
        stats = answer["execution_stats"]
        assert (stats["gpu_blocks_executed"], stats["cpu_blocks_executed"]) == (4, 3)


def test_twenty_clients_go_on_when_the_process_of_the_device_dies(stack: ComposeStack) -> None:
    """Inside its container, whose worker outlives it: CPUs take its blocks over, and it comes back."""
    wait_for_the_device(stack)
    (gpu,) = stack.containers("worker-webgpu")
    begun = threading.Semaphore(0)

    def answer(number: int) -> dict[str, Any]:
        body = {"prompt": f"{PROMPT[:60]} {number}", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        with connect(stack.url.replace("http", "ws")) as socket:
            socket.send(json.dumps(body | {"stream": True}))
            while True:
                told = json.loads(socket.recv(timeout=300))
                assert told["status"] in ("accepted", "token", "success"), told
                if told["status"] == "success":
                    return told
                if told.get("position") == 2:
                    begun.release()

    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(answer, number) for number in range(20)]
        for _ in range(20):
            assert begun.acquire(timeout=300)
        killed = stack.python(gpu, KILL_DEVICE)
        assert killed.returncode == 0, killed.stderr
        answers = [one.result(timeout=600) for one in asked]
    moved = [one for one in answers if one["fallback_events"]]
    assert moved, "none was on the device"
    for one in answers:
        assert len(one["outputs"]["token_ids"]) == 60
    for one in moved:
        (event,) = one["fallback_events"]
        assert (event["block_id"], event["blocks"]) == ("block_4", BLOCKS[3:])
        assert (event["reason"], event["error_code"], event["success"]) == ("gpu_device_lost", "INTERNAL", True)
    assert stack.inspect(gpu)["State"]["Running"], "its worker has outlived it"
    wait_for_the_device(stack)


def test_a_stream_outlives_the_container_of_the_gpu(stack: ComposeStack) -> None:
    wait_for_the_device(stack)
    with OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        (gpu,) = stack.containers("worker-webgpu")
        model = client.models.list().data[0].id
        stream = client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=200,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        request_id, tokens, prompt_tokens = "", 0, 0
        for chunk in stream:
            tokens += bool(chunk.choices and chunk.choices[0].text)
            request_id = chunk.id
            if chunk.usage is not None:
                prompt_tokens = chunk.usage.prompt_tokens
            if tokens == 40 and stack.inspect(gpu)["State"]["Running"]:
                stack.kill(gpu)
        stack.start(gpu)
        wait_for_the_device(stack)
        view = client.get(f"/requests/{request_id}", cast_to=object)
        view = json.loads(json.dumps(view))
        (event,) = view["fallback_events"]
        assert (event["block_id"], event["from"], event["to"], event["success"]) == ("block_4", "GPU", "CPU", True)
        assert event["position"] >= 40
        assert prompt_tokens > 4 * MOST_ROWS_AGAIN and event["rows_recomputed"] <= MOST_ROWS_AGAIN
