"""KV that a step gave or asked for, and processes that die meanwhile."""

import base64
from typing import Any

import httpx
import pytest

from tests.support.systems.system import StartSystem
from tests.support.waiting import wait_until

TOKENS = [(7 * position + 3) % 500 for position in range(100)]


def infer(url: str, **more: Any) -> dict[str, Any]:
    given = more.pop("given", {})
    body = {"input_tensors": {"input_ids": [TOKENS], **given}, **more}
    answer = httpx.post(f"{url}/v1/infer", json=body, timeout=90)
    assert answer.is_success, answer.text
    return answer.json()


@pytest.mark.parametrize("where", ["worker.before_page_get", "worker.after_compute", "worker.before_result"])
def test_a_worker_that_dies_changes_nothing(start_system: StartSystem, where: str) -> None:
    """Those that have the step die when they come to `where`; others go on with it."""
    system = start_system(stages=2)
    url, _ = system.start_gateway()
    whole = infer(url, blocks=f"1-{system.block_folder.model.blocks}")["outputs"]
    given = {name.replace("present", "past_key_values"): first_96(whole[name]) for name in whole if name != "logits"}
    for worker in system.workers:
        worker.kill()
    for _ in range(2):
        system.start_worker(failpoint=f"{where}:kill")
    wait_until(lambda: len([w for w in system.infos() if w.ready and w.is_alive]) == 2, "those serve", timeout_s=60)
    wait_until(lambda: len(system.infos()) == 2, "the first two are gone")
    for _ in range(2):
        system.start_worker()
    system.wait_ready(4)
    asked = infer(url, given=given, blocks="1-2", cache_salt="other")
    assert asked["outputs"] == {name: whole[name] for name in asked["outputs"]}
    assert len(asked["outputs"]) == 5
    assert any(worker.poll() == -9 for worker in system.workers[2:]), "somebody has died"


def first_96(tensor: dict[str, Any]) -> dict[str, Any]:
    """The same without its last positions."""
    rows, heads, positions, size = tensor["shape"]
    raw, item = base64.b64decode(tensor["data_b64"]), {"float16": 2, "float32": 4}[tensor["dtype"]]
    each = positions * size * item
    kept = b"".join(raw[head * each : head * each + 96 * size * item] for head in range(rows * heads))
    return {**tensor, "shape": [rows, heads, 96, size], "data_b64": base64.b64encode(kept).decode()}
