"""Which worker computed which token: the answer, the workers' logs and the provenance say the same."""

import os
import signal
from typing import Any

import httpx

from blockrelay.protocol.encoding.request_ids import own_id
from tests.support.logs import entries
from tests.support.systems.system import StartSystem, System
from tests.support.waiting import wait_until

#: However busy the machine is, a few tokens are not all of an answer.
SLOW = {"inject_speed": "0.05"}
BODY: dict[str, Any] = {"prompt": [1, 5, 9], "max_tokens": 60, "temperature": 0, "ignore_eos": True, "background": True}


def logged(system: System, request_id: str) -> list[tuple[int, str]]:
    """Tokens before each run of the request, and its route, as workers of the first stage have logged its begin."""
    starts = [
        entry["data"]
        for number in range(len(system.workers))
        for entry in entries(system.folder / f"worker-{number}.log", "RUN_START")
        if entry["request_id"] == request_id
    ]
    return sorted((start["committed"], ",".join(start["route"])) for start in starts)


def test_a_worker_dies_in_mid_answer(start_system: StartSystem) -> None:
    system = start_system(stages=3, worker=SLOW)
    url, _ = system.start_gateway()
    with httpx.Client(base_url=url, timeout=60) as http:
        name = http.post("/v1/completions", json=BODY).json()["id"]

        def shown(what: str = "") -> dict[str, Any]:
            answer = http.get(f"/v1/requests/{name}{what}")
            assert answer.status_code == 200, answer.text
            return answer.json()

        wait_until(lambda: shown("/provenance")["completion_tokens"] > 2, "it has tokens")
        (first,) = shown("/provenance")["runs"]
        assert [stage["worker"] for stage in first["stages"]] == [
            next(w.id for w in system.infos() if w.stage == stage) for stage in range(3)
        ]
        os.kill(system.pid_of(1), signal.SIGKILL)
        system.start_worker(**SLOW)
        wait_until(lambda: shown()["finish_reason"], "it has ended")
        answer, told = shown(), shown("/provenance")
    runs = told["runs"]
    assert [run["attempt"] for run in runs] == [1, 2] and runs[0]["begin"] == 0 and runs[1]["end"] == 60
    assert runs[0]["end"] == runs[1]["begin"] > 2
    (rerun,) = [event for event in answer["timeline"] if event["event"] == "rerun"]
    assert rerun["tokens"] == runs[1]["begin"]
    assert {stage["numerics"] for run in runs for stage in run["stages"]} == {answer["system_fingerprint"]}
    routes = [(run["begin"], ",".join(stage["worker"] for stage in run["stages"])) for run in runs]
    assert routes == logged(system, own_id(answer["request_id"]))
    assert routes[0] != routes[1]
    epochs = [{stage["epoch"] for stage in run["stages"]} for run in runs]
    assert max(epochs[1]) > max(epochs[0]), "a new plan gave the new worker its blocks"
