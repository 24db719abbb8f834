"""A client limits how much slower a CPU may be than the GPU that fails under it: one goes on, another one ends.

The device is ONNX Runtime's own CPU provider, under the class gpu, in a process of its own that is killed.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any, cast

import httpx

from tests.support.systems.device_processes import child_of
from tests.support.systems.gpu_systems import on_gpu, with_gpu
from tests.support.systems.system import StartSystem, System, assert_nothing_is_held
from tests.support.waiting import wait_until


def predicted(system: System) -> dict[str, float]:
    """What schedulers have published, by the blocks of a stage."""
    told = cast(bytes | None, system.client.hget(system.keys.plan(system.model_key), "slowdowns"))
    return json.loads(told) if told else {}


class Client:
    """Sends requests to a gateway of a system and reads what became of them."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def begin(self, tokens: int, **more: object) -> str:
        """The id of a request that has its first tokens and goes on."""
        body = {"prompt": [1, 5, 9], "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "background": True}
        answer = self._http.post("/v1/completions", json=body | more)
        assert answer.status_code == 202, answer.text
        request_id: str = answer.json()["id"]
        wait_until(lambda: self.seen(request_id)["usage"]["completion_tokens"] > 0, "it has a token")
        return request_id

    def seen(self, request_id: str) -> dict[str, Any]:
        return self._http.get(f"/v1/requests/{request_id}").json()

    def end(self, request_id: str) -> dict[str, Any]:
        wait_until(lambda: self.seen(request_id)["status"] not in ("queued", "running"), "it has ended")
        return self.seen(request_id)


def lose_the_device(system: System) -> None:
    os.kill(child_of(system.workers[-1].pid), signal.SIGKILL)


def measured_on_the_gpu(system: System, client: Client) -> tuple[str, float]:
    """The blocks of the GPU's stage, and how slow a CPU is predicted to be: both have measured themselves."""
    system.wait_ready(3)
    client.end(client.begin(100))
    (gpu,) = on_gpu(system)
    stage = f"{gpu.first}-{gpu.last}"
    wait_until(lambda: on_gpu(system)[0].block_times is not None, "the GPU has measured itself")
    wait_until(lambda: stage in predicted(system), "a slowdown is predicted")
    return stage, predicted(system)[stage]


def test_a_cpu_takes_over_where_it_is_fast_enough_and_else_the_request_ends(start_system: StartSystem) -> None:
    system = start_system(stages=2)
    url, _ = system.start_gateway()
    with httpx.Client(base_url=url, timeout=60) as http:
        allowed_and_refused(system, Client(http))


def allowed_and_refused(system: System, client: Client) -> None:
    client.end(client.begin(100))
    wait_until(lambda: all(one.block_times for one in system.infos()), "both CPUs have measured themselves")
    assert predicted(system) == {}
    system.start_worker(device="gpu", gpu="cpu")
    stage, ratio = measured_on_the_gpu(system, client)

    allowed = client.begin(400, fallback={"max_slowdown": 1000 * ratio})
    lose_the_device(system)
    shown = client.end(allowed)
    assert (shown["status"], shown["usage"]["completion_tokens"]) == ("completed", 400), shown
    (event,) = shown["fallback_events"]
    first, _, last = stage.partition("-")
    assert (event["blocks"][0], event["blocks"][-1]) == (f"block_{first}", f"block_{last}")
    assert event["success"] and event["reason"] == "gpu_device_lost"
    assert 0 < event["predicted_slowdown"] <= 1000 * ratio
    assert event["seen_slowdown"] > 0

    stage, ratio = measured_on_the_gpu(system, client)
    refused = client.begin(400, fallback={"max_slowdown": ratio / 1000})
    lose_the_device(system)
    shown = client.end(refused)
    assert (shown["status"], shown["error"]["code"]) == ("failed", "fallback_too_slow"), shown
    for told in (f"block_{first}", "max_slowdown of ", "predicted to take", "times as long"):
        assert told in shown["error"]["message"], shown["error"]
    assert shown["fallback_events"] == [] and 0 < shown["usage"]["completion_tokens"] < 400
    assert shown["timeline"][-2]["event"] == "fallback_denied"
    assert_nothing_is_held(system)


def test_a_profile_predicts_it_before_anything_was_measured(start_system: StartSystem, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({f"block_{number}": {"CPU": 0.3, "GPU": 0.2} for number in range(1, 6)}))
    system = with_gpu(start_system, scheduler_env={"BLOCKRELAY_PROFILE": str(profile)})
    (gpu,) = on_gpu(system)
    wait_until(lambda: predicted(system) == {f"{gpu.first}-{gpu.last}": 1.5}, "the profile's figures are published")
    cpu = next(worker for worker in system.infos() if worker.device == "cpu" and worker.first == gpu.first)
    os.kill(cpu.pid, signal.SIGKILL)
    wait_until(lambda: predicted(system) == {}, "no stand-in is left")
