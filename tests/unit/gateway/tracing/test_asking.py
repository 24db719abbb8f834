"""How a client asks for the stages of a request, and what it is answered."""

import json
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.sync.client import connect

from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.encoding.stage_span import StageSpan
from blockrelay.protocol.messages import Claimed
from tests.support.gateway.played import PlayedWorker, RunningGateway

PROMPT: dict[str, Any] = {"prompt": "Anna had a secret", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
TENSORS: dict[str, Any] = {"input_tensors": {"input_ids": [[1, 5]]}}
HEADER = {"Blockrelay-Trace": "true"}
ROUTES = [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT), ("/v1/infer", PROMPT)]


def ask(gateway: RunningGateway, path: str = "/v1/infer", headers: dict[str, str] | None = None, **body: Any) -> str:
    """A request in the background; its id."""
    answer = gateway.http.post(path, json={"background": True, **body}, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.headers["x-request-id"]


def end(worker: PlayedWorker, claimed: Claimed) -> None:
    worker.say(claimed, [7, 8], end="length", meta={"route": ["w0", "w1"]})


def tell(worker: PlayedWorker, claimed: Claimed, **more: Any) -> None:
    """What a worker would write of one step."""
    now_us = 1000 * int(worker.record(claimed.request_id)[b"claimed_ms"])
    told: dict[str, Any] = {
        "run": 1, "worker_id": "w0", "stage": 0, "first": 1, "last": 1, "number": 0, "kind": "prefill",
        "position": 0, "rows": 4, "batch_rows": 4, "ready_us": now_us, "waited_us": 10, "computed_us": 900,
    } | more  # fmt: skip
    worker.client.xadd(worker.keys.trace(claimed.request_id), StageSpan(**told).encode())  # pyright: ignore
    worker.client.expire(worker.keys.trace(claimed.request_id), 60)


def trace_of(gateway: RunningGateway, request_id: str) -> httpx.Response:
    return gateway.http.get(f"/v1/requests/{request_id}/trace")


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_the_field_and_the_header_ask_on_every_route_and_the_field_wins(
    gateway: RunningGateway, worker: PlayedWorker, path: str, body: dict[str, Any]
) -> None:
    ways = [({}, {}), (HEADER, {}), ({}, {"trace": True}), (HEADER, {"trace": False}), (HEADER, {"trace": None})]
    for headers, more in ways:
        ask(gateway, path, headers, **body, **more)
    assert [claimed.body.traced for claimed in worker.claim(5)] == [False, True, True, False, True]


def test_a_tensor_step_asks_too(gateway: RunningGateway, worker: PlayedWorker) -> None:
    url = f"ws{gateway.url.removeprefix('http')}/v1/infer/ws"
    with connect(url) as asked, connect(url, additional_headers=HEADER) as by_header:
        for socket, more in ((asked, {"trace": True}), (asked, {}), (by_header, {})):
            socket.send(json.dumps({**TENSORS, **more}))
            (claimed,) = worker.claim()
            assert claimed.body.traced == (socket is by_header or bool(more))
            worker.finish_tensor(claimed, np.zeros((1, 512), np.float32))
            assert json.loads(socket.recv())["status"] == "success"


@pytest.mark.parametrize(
    ("headers", "more", "param"),
    [
        ({"Blockrelay-Trace": "yes"}, {}, "Blockrelay-Trace"),
        ({}, {"trace": "yes"}, "trace"),
        ({}, {"trace": 1}, "trace"),
    ],
)
def test_what_is_neither_true_nor_false_is_refused(
    gateway: RunningGateway, headers: dict[str, str], more: dict[str, Any], param: str
) -> None:
    refused = gateway.http.post("/v1/completions", json={**PROMPT, **more}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_the_same_key_with_and_without_a_trace_is_one_request(gateway: RunningGateway, worker: PlayedWorker) -> None:
    key = {"Idempotency-Key": "k"}
    first = ask(gateway, "/v1/completions", key, **PROMPT)
    assert ask(gateway, "/v1/completions", key | HEADER, **PROMPT) == first
    assert ask(gateway, "/v1/completions", key, **PROMPT, trace=True) == first
    assert [claimed.body.traced for claimed in worker.claim()] == [False], "the first one decides"
    assert trace_of(gateway, first).status_code == 404


def test_a_trace_is_there_while_its_request_runs_and_when_it_has_ended(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    request_id = ask(gateway, **PROMPT, trace=True)
    queued = trace_of(gateway, request_id).json()["traceEvents"]
    assert [event["name"] for event in queued if event["ph"] == "X"] == ["text_completion tiny", "queue"]
    (claimed,) = worker.claim()
    tell(worker, claimed)
    worker.client.xadd(worker.keys.trace(claimed.request_id), {"span": b"not a step"})
    running = trace_of(gateway, request_id).json()["traceEvents"]
    (step,) = [event for event in running if event["ph"] == "X" and event["pid"] == 2]
    assert (step["name"], step["dur"], step["args"]["blockrelay.rows"]) == ("prefill", 900, 4)
    end(worker, claimed)
    ended = trace_of(gateway, request_id)
    assert ended.status_code == 200 and "Anna" not in ended.text
    (whole,) = [event for event in ended.json()["traceEvents"] if event["name"] == "text_completion tiny"]
    assert whole["args"]["gen_ai.response.finish_reasons"] == ["length"]
    assert whole["args"]["blockrelay.stage_steps"] == 1
    assert own_id(whole["args"]["gen_ai.response.id"]) == claimed.request_id


def test_without_what_stages_told_there_is_no_trace(gateway: RunningGateway, worker: PlayedWorker) -> None:
    plain, gone = ask(gateway, **PROMPT), ask(gateway, **PROMPT, trace=True)
    for claimed in worker.claim(2):
        end(worker, claimed)
    answers = [
        trace_of(gateway, request_id) for request_id in (plain, gone, "req-000000000000000000000000", "nonsense")
    ]
    assert [answer.status_code for answer in answers] == [404] * 4
    words = ["was not sent with trace: true", "are gone, or were never written", "unknown", "is not a request id"]
    for answer, expected in zip(answers, words, strict=True):
        assert expected in answer.json()["error"]["message"]


def test_another_tenants_trace_is_unknown(gateway: RunningGateway, worker: PlayedWorker) -> None:
    request_id = ask(gateway, **PROMPT, trace=True)
    worker.client.hset(worker.keys.request(own_id(request_id)), "tenant", "somebody")
    refused = trace_of(gateway, request_id)
    assert refused.status_code == 404 and "unknown" in refused.json()["error"]["message"]
