"""`max_tokens` is a ceiling: the answer says what was in force, and a retry gets what was."""

from typing import Any

import pytest

from blockrelay.settings import GatewaySettings
from tests.support.gateway.played import PlayedWorker, RunningGateway, answering, running_gateway
from tests.support.gateway.sse_client import read_events

CONTEXT = 512
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def in_force(answer: dict[str, Any]) -> int:
    return answer["choices"][0]["max_tokens"]


@pytest.mark.parametrize("asked", [65_535, 10**300])
def test_more_than_the_context_is_cut_to_its_room(gateway: RunningGateway, worker: PlayedWorker, asked: int) -> None:
    with answering(worker, lambda _: ([5], "stop")):
        answer = gateway.post("/v1/completions", prompt=[3] * 500, max_tokens=asked)
        chat = gateway.post("/v1/chat/completions", **CHAT, max_completion_tokens=asked).json()
        infer = gateway.post("/v1/infer", prompt=[3] * 500, max_tokens=asked).json()
    assert answer.status_code == 200 and in_force(answer.json()) == infer["max_tokens"] == 12
    assert in_force(chat) == CONTEXT - chat["usage"]["prompt_tokens"]
    record = gateway.http.get(f"/v1/requests/{answer.headers['x-request-id']}").json()
    assert record["max_tokens"] == 12


def test_streams_and_background_requests_say_it_too(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with answering(worker, lambda _: ([5], "stop")):
        for path, body in (("/v1/completions", {"prompt": [3] * 500}), ("/v1/chat/completions", CHAT)):
            with gateway.http.stream("POST", path, json={**body, "stream": True, "max_tokens": 512}) as response:
                *_, last, _ = events = [event.data for event in read_events(response)]
            assert in_force(last) > 0
            if "chat" in path:
                assert in_force(events[0]) == in_force(last), "before the first token, for who wants more room"
        assert gateway.post("/v1/completions", prompt=[3] * 500, background=True).json()["max_tokens"] == 12


def test_only_a_prompt_that_does_not_fit_is_refused(gateway: RunningGateway) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": [3] * CONTEXT}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
        ("/v1/infer", {"prompt": [3] * 600}, "prompt"),
    ):
        refused = gateway.post(path, **body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert "maximum context length is 512 tokens" in error["message"], "clients look for OpenAI's words"


def test_a_setting_bounds_it_and_a_retry_takes_what_was_in_force(
    gateway: RunningGateway, settings: GatewaySettings, worker: PlayedWorker
) -> None:
    key = {"idempotency-key": "k"}
    body = {"prompt": "Anna", "max_tokens": 100}
    with (
        running_gateway(settings.model_copy(update={"max_tokens_limit": 7})) as bounded,
        answering(worker, lambda _: ([5], "stop")),
    ):
        first = bounded.http.post("/v1/completions", json=body, headers=key)
        again = gateway.http.post("/v1/completions", json=body, headers=key)
        default = bounded.post("/v1/completions", prompt="Anna").json()
        anew = gateway.post("/v1/completions", **body).json()
    assert in_force(first.json()) == in_force(default) == 7 and in_force(anew) == 100
    assert again.json() == first.json() and again.headers["idempotent-replayed"] == "true"


def test_a_key_is_charged_for_what_is_in_force(gateway: RunningGateway, worker: PlayedWorker) -> None:
    """And the KV pages of a pool are counted for it."""
    worker.register(pages=32, plan=False)
    with answering(worker, lambda _: ([5], "stop")):
        assert gateway.post("/v1/completions", prompt="Anna", max_tokens=10**9).status_code == 200
    worker.register(pages=20, plan=False)
    refused = gateway.post("/v1/completions", prompt=[3] * 20, max_tokens=10**9)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
    assert "need 32 KV pages" in refused.json()["error"]["message"]
    assert "send a max_tokens of at most 300" in refused.json()["error"]["message"]
