"""What a request may say of the devices that compute it: as a field on every route, or as a header."""

import json
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
    ways: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({}, {}),
        (HEADERS, {}),
        ({}, {"exact": True, "fallback": "recompute"}),
        (HEADERS, {"exact": False, "fallback": "allow"}),
    ]
    for headers, more in ways:
        answer = gateway.http.post(path, json={"background": True, **BODIES[path], **more}, headers=headers)
        assert answer.status_code == 202, answer.text
    found = [(claimed.body.exact, claimed.body.fallback) for claimed in worker.claim(4)]
    assert found == [(False, "allow"), (True, "deny"), (True, "recompute"), (False, "allow")]


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


@pytest.mark.parametrize(
    ("headers", "more", "param"),
    [
        ({"Blockrelay-Exact": "1"}, {}, "Blockrelay-Exact"),
        ({"Blockrelay-Fallback": "never"}, {}, "Blockrelay-Fallback"),
        ({}, {"fallback": "never"}, "fallback"),
        ({}, {"fallback": True}, "fallback"),
    ],
)
def test_what_they_cannot_be_is_refused_by_name(
    gateway: RunningGateway, headers: dict[str, str], more: dict[str, Any], param: str
) -> None:
    refused = gateway.http.post("/v1/completions", json=TEXT | more, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_request_that_waited_for_a_gpu_in_vain_ends_with_an_error(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    answer = gateway.http.post("/v1/completions", json=TEXT | {"background": True, "fallback": "deny"})
    (claimed,) = worker.claim()
    meta = {"error": "no GPU came", "code": "fallback_denied"}
    worker.scripts.run(calls.finish(claimed.request_id, "error", meta=meta, run_id=claimed.run_id))
    shown = gateway.http.get(f"/v1/requests/{answer.json()['id']}").json()
    assert (shown["status"], shown["error"]["code"]) == ("failed", "fallback_denied"), shown
