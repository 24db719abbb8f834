"""Somebody watches what every stage does, while others ask."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from blockrelay.auth.api_keys import Tenant, add_key
from tests.support.systems.up_process import UpProcess, running_up
from tests.support.waiting import wait_until

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def two_stages(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    with running_up(tiny_model, "--stages", "2", "--no-speculation", data=tmp_path_factory.mktemp("data") / "up") as up:
        yield up


@contextmanager
def watching(up: UpProcess, key: str = "none", *, workers: int = 1) -> Iterator[list[dict[str, Any]]]:
    """The events that a client hears, from when the workers know that somebody listens."""
    heard: list[dict[str, Any]] = []
    headers = {"authorization": f"Bearer {key}"}
    over = threading.Event()
    with httpx.stream("GET", f"{up.url}/v1/status/events", headers=headers, timeout=30) as response:
        assert response.headers["content-type"].startswith("text/event-stream")

        def read() -> None:
            with suppress(httpx.HTTPError, httpx.StreamClosed):
                for line in response.iter_lines():
                    if over.is_set():
                        return
                    if line.startswith("data: "):
                        heard.append(json.loads(line[len("data: ") :]))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            # A worker notices within half a second: ask until all have.
            wait_until(
                lambda: (ask(up, key), len({event["node_id"] for event in list(heard)}) == workers)[1], "events come"
            )
            yield heard
        finally:
            over.set()
            ask(up, key)  # one more event, with which the reader ends
            reader.join(10)
            assert not reader.is_alive()


def ask(up: UpProcess, key: str = "none", tokens: int = 4) -> str:
    """Ask for a few tokens; the request's id."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{up.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


def of(events: list[dict[str, Any]], request_id: str) -> list[dict[str, Any]]:
    return [event for event in list(events) if event["request_id"] == request_id]


def test_start_and_end_of_every_stage_s_steps_are_events(two_stages: UpProcess) -> None:
    up = two_stages
    with watching(up, workers=2) as heard:
        request_id = ask(up)
        # Four tokens: the prompt and three more steps, each in two stages, begun and ended.
        wait_until(lambda: len(of(heard, request_id)) == 16, "all its events are heard")
        found = of(heard, request_id)

        base = {"model": "tiny", "start_layer": 0, "end_layer": 3, "n_layers": 4}
        assert all(event["type"] == "node_status" and event["base_shard"] == base for event in found)
        assert all(event["prompt_tokens"] == len(PROMPT) for event in found)
        shards = {(event["shard"]["start_layer"], event["shard"]["end_layer"]) for event in found}
        assert shards == {(0, 2), (3, 3)}
        first = [event for event in found if event["shard"]["start_layer"] == 0]
        assert [event["status"] for event in first] == ["start_process_prompt", "end_process_prompt"] + 3 * [
            "start_process_tensor",
            "end_process_tensor",
        ]
        second = [event for event in found if event["shard"]["start_layer"] == 3]
        assert [event["status"] for event in second] == 4 * ["start_process_tensor", "end_process_tensor"]
        assert first[0]["inference_state"] == {"position": 0, "rows": 4}
        assert first[2]["inference_state"] == {"position": 4, "rows": 1}
        ends = [event for event in found if event["status"].startswith("end")]
        assert all(event["elapsed_time_ns"] > 0 for event in ends)
        assert [event["result_size"] for event in first if event in ends] == [4 * 64, 64, 64, 64]
        assert {event["result_size"] for event in second if event in ends} == {512}  # logits of one row
        assert len({event["node_id"] for event in found}) == 2


def test_a_client_sees_whose_its_own_requests_are_and_an_operator_sees_all(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    ada, bob = add_key(path, Tenant(name="ada")), add_key(path, Tenant(name="bob"))
    chief = add_key(path, Tenant(name="chief", operator=True))
    with running_up(tiny_model, "--api-keys", str(path)) as up:
        assert httpx.get(f"{up.url}/v1/status/events").status_code == 401
        with watching(up, ada) as of_ada, watching(up, chief) as of_chief:
            hers, his = ask(up, ada), ask(up, bob)
            wait_until(lambda: len(of(of_chief, his)) == 8 and len(of(of_chief, hers)) == 8, "the operator sees all")
            wait_until(lambda: len(of(of_ada, hers)) == 8, "she sees her own")
            end = len(of_chief)
            wait_until(lambda: len(of_ada) >= 16 and len(of_chief) == end, "and all have come")
        assert not of(of_ada, his)
        nameless = [event for event in of_ada if event["request_id"] is None]
        assert len(nameless) >= 8
        assert his not in json.dumps(of_ada)


def follow_by_command(data: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "blockrelay_launcher", "status", "--follow", "--data", str(data), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})


def test_the_command_follows_without_a_gateway_and_ends_with_ctrl_c(two_stages: UpProcess) -> None:
    up = two_stages
    assert up.data is not None
    lines: dict[str, list[str]] = {"plain": [], "json": []}
    with follow_by_command(up.data) as plain, follow_by_command(up.data, "--json") as as_json:
        readers: list[threading.Thread] = []
        for process, found in ((plain, lines["plain"]), (as_json, lines["json"])):
            assert process.stdout is not None
            readers.append(threading.Thread(target=found.extend, args=(iter(process.stdout.readline, ""),)))
            readers[-1].start()
        wait_until(lambda: (ask(up), all("start_process_prompt" in "".join(found) for found in lines.values()))[1],
                   "both tell of prompts", timeout_s=20)  # fmt: skip
        for process in (plain, as_json):
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        for reader in readers:
            reader.join(10)
    assert json.loads(lines["json"][0])["type"] == "node_status"
    assert "layers 0-2" in "".join(lines["plain"])


def test_status_says_what_each_worker_has_spent_its_time_on(two_stages: UpProcess) -> None:
    ask(two_stages, tokens=20)
    command = [sys.executable, "-m", "blockrelay_launcher", "status", "--data", str(two_stages.data)]
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True, text=True).stdout)
    (model,) = found["models"].values()
    first, last = (worker["totals"] for worker in sorted(model["workers"], key=lambda worker: worker["stage"]))
    for totals in (first, last):
        assert totals["inferences"] >= 20
        spent = ("inference_s", "token_generation_s", "state_transfer_s")
        assert 0 < sum(totals[name] for name in spent) <= totals["total_s"]
        assert 0 < totals["cache_management_s"] < totals["total_s"]
    assert first["state_transfer_s"] > 0 == first["token_generation_s"] and first["prompt_tokens"] >= len(PROMPT)
    assert last["token_generation_s"] > 0 == last["state_transfer_s"] and last["tokens"] >= 20
    shown = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert "what workers spent their time on" in shown


def test_followers_end_with_the_gateway(tiny_model: Path) -> None:
    began, ended = threading.Event(), threading.Event()

    def follow(url: str) -> None:
        with httpx.stream("GET", f"{url}/v1/status/events", timeout=30) as response:
            began.set()
            for _ in response.iter_lines():
                pass
        ended.set()

    with running_up(tiny_model) as up:
        threading.Thread(target=follow, args=(up.url,)).start()
        assert began.wait(10)
        assert up.stop() == 0
    assert ended.wait(10), "the stream was ended, not broken"
