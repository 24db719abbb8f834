"""What a request may say of the devices that compute it: as a field on every route, or as a header."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from websockets.sync.client import connect

from blockrelay.protocol.transitions import calls
from tests.support.gateway.played import PlayedWorker, RunningGateway

TEXT: dict[str, Any] = {"prompt": "Anna had a secret", "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/infer": TEXT,
}
HEADERS = {"Blockrelay-Exact": "true", "Blockrelay-Fallback": "deny"}


@pytest.mark.parametrize("path", BODIES)
def test_fields_and_headers_say_the_same_and_fields_win(
    gateway: RunningGateway, worker: PlayedWorker, path: str
) -> None:
    limit = {"Blockrelay-Fallback": "Max_Slowdown = 1e1"}
    ways: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({}, {}),
        (HEADERS, {}),
        ({}, {"exact": True, "fallback": "recompute"}),
        (HEADERS, {"exact": False, "fallback": "allow"}),
        (limit, {}),
        (limit, {"fallback": "deny"}),
        (HEADERS, {"exact": False, "fallback": {"max_slowdown": 2}}),
        ({}, {"fallback": {"max_slowdown": 0.25}}),
    ]
    for headers, more in ways:
        answer = gateway.http.post(path, json={"background": True, **BODIES[path], **more}, headers=headers)
        assert answer.status_code == 202, answer.text
    found = [(claimed.body.exact, claimed.body.fallback) for claimed in worker.claim(8)]
    assert found[:4] == [(False, "allow"), (True, "deny"), (True, "recompute"), (False, "allow")]
    assert found[4:] == [(False, "max:10.0"), (False, "deny"), (False, "max:2.0"), (False, "max:0.25")]


def test_they_are_known_to_messages_on_a_socket_and_to_tensor_steps(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    url = f"ws{gateway.url.removeprefix('http')}/v1/infer/ws"
    steps = {"input_tensors": {"input_ids": [[1, 5]]}}
    with connect(url) as asked, connect(url, additional_headers=HEADERS) as by_header:
        for socket, body in ((asked, TEXT | {"fallback": "deny"}), (by_header, TEXT), (by_header, steps)):
            socket.send(json.dumps(body))
            (claimed,) = worker.claim()
            assert claimed.body.fallback == "deny" and claimed.body.exact == (socket is by_header)
        for body in (TEXT, steps):
            asked.send(json.dumps(body | {"fallback": {"max_slowdown": 2.5}}))
            (claimed,) = worker.claim()
            assert claimed.body.fallback == "max:2.5"


@pytest.mark.parametrize(
    ("headers", "more", "param"),
    [
        ({"Blockrelay-Exact": "1"}, {}, "Blockrelay-Exact"),
        ({"Blockrelay-Fallback": "never"}, {}, "Blockrelay-Fallback"),
        ({}, {"fallback": "never"}, "fallback"),
        ({}, {"fallback": True}, "fallback"),
        ({}, {"fallback": ["deny"]}, "fallback"),
        ({}, {"fallback": 2.0}, "fallback"),
        ({}, {"fallback": "max:2.0"}, "fallback"),
        ({}, {"fallback": {}}, "fallback.max_slowdown"),
        ({}, {"fallback": {"max_slowdown": 2.0, "least": 1}}, "fallback.least"),
        *(
            ({}, {"fallback": {"max_slowdown": wrong}}, "fallback.max_slowdown")
            for wrong in (0, 0.0, -0.0, -1, True, None, "2", [2], 10**400)
        ),
        *(
            ({"Blockrelay-Fallback": f"max_slowdown{wrong}"}, {}, "Blockrelay-Fallback")
            for wrong in ("", "=", "=0", "=-1", "=nan", "=inf", "=1e999", "=two", "=2;allow", "=2.0.0", ":2")
        ),
    ],
)
def test_what_they_cannot_be_is_refused_by_name(
    gateway: RunningGateway, headers: dict[str, str], more: dict[str, Any], param: str
) -> None:
    for path, body in BODIES.items():
        refused = gateway.http.post(path, json=body | more, headers=headers)
        told = refused.json()
        assert (refused.status_code, told["error"]["param"]) == (400, param), told
        assert param in told["error"]["message"]
        if param == "fallback":
            assert '{"max_slowdown": NUMBER}' in told["error"]["message"], "all that it can be"


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_limit_that_is_no_finite_number_is_refused(gateway: RunningGateway, wrong: float) -> None:
    body = json.dumps(TEXT | {"fallback": {"max_slowdown": wrong}})  # no JSON, but parsers of Python take it
    refused = gateway.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert refused.status_code == 400, refused.text


def test_a_request_that_waited_for_a_gpu_in_vain_ends_with_an_error(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    answer = gateway.http.post("/v1/completions", json=TEXT | {"background": True, "fallback": "deny"})
    (claimed,) = worker.claim()
    meta = {"error": "no GPU came", "code": "fallback_denied"}
    worker.scripts.run(calls.finish(claimed.request_id, "error", meta=meta, run_id=claimed.run_id))
    shown = gateway.http.get(f"/v1/requests/{answer.json()['id']}").json()
    assert (shown["status"], shown["error"]["code"]) == ("failed", "fallback_denied"), shown


def test_a_request_whose_stand_in_is_too_slow_ends_with_an_error_of_its_own(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    meta = {"error": "a CPU takes too long at block_3", "code": "fallback_too_slow", "failed_block": "block_3"}
    for path, body in BODIES.items():
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(gateway.http.post, path, json=body | {"fallback": {"max_slowdown": 1.5}})
            (claimed,) = worker.claim()
            worker.scripts.run(calls.finish(claimed.request_id, "error", meta=meta, run_id=claimed.run_id))
            answer = asked.result()
        told = answer.json()
        assert (answer.status_code, told["error"]["code"]) == (500, "fallback_too_slow"), told
        assert told["error"]["message"] == meta["error"]
        if path == "/v1/infer":
            assert told["failed_block"] == "block_3"
