"""`docker compose --profile webgpu up`: a GPU worker in its container, on a Vulkan driver that computes on CPUs."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from openai import OpenAI

from blockrelay.protocol.constants import PAGE_TOKENS
from tests.support.project import ROOT
from tests.support.systems.compose_stack import ComposeStack, leftovers

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

#: Many pages of KV, so that computing it again is told from going on behind it.
PROMPT = " ".join(["Tom has three apples and Anna gives him two more."] * 25)
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
        environment = {"GPU_DEVICE": "/dev/null", "BLOCKRELAY_STAGE_DEVICES": "gpu,cpu", "BLOCKRELAY_WORKERS": "2"}
        stack = ComposeStack(None, more, profile="webgpu", **environment)
        stack.down()
        try:
            stack.build()
            stack.up()
            stack.wait_worker_ready([*stack.containers("worker"), *stack.containers("worker-webgpu")])
            yield stack
        finally:
            stack.down()
        assert not leftovers()


def test_a_stream_outlives_the_container_of_the_gpu(stack: ComposeStack) -> None:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        (gpu,) = stack.containers("worker-webgpu")
        model = client.models.list().data[0].id
        stream = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        request, tokens = "", 0
        for chunk in stream:
            tokens += bool(chunk.choices[0].text)
            request = chunk.id
            if tokens == 40 and stack.inspect(gpu)["State"]["Running"]:
                stack.kill(gpu)
        view = client.get(f"/requests/{request}", cast_to=object)
        view = json.loads(json.dumps(view))
        (event,) = view["fallback_events"]
        assert (event["block_id"], event["from"], event["to"], event["success"]) == ("block_1", "GPU", "CPU", True)
        assert event["position"] >= 40
        assert view["prompt_tokens"] > 4 * MOST_ROWS_AGAIN and event["rows_recomputed"] <= MOST_ROWS_AGAIN
    stack.start(gpu)
    stack.wait_worker_ready([gpu])
