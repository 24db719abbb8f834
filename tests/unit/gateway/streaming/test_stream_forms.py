"""Streams in the forms that clients ask for: plain, with ids, with the usage of each event."""

import json
from typing import Any

import pytest

from blockrelay.protocol.messages import EndReason
from tests.support.gateway.played import PlayedWorker, RunningGateway, answering
from tests.support.gateway.sse_client import read_events
from tests.support.gateway.streams import WITH_IDS, stream, wait_for_keep_alives


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_is_plain_for_who_asks_for_no_ids(gateway: RunningGateway, worker: PlayedWorker, path: str) -> None:
    """Benchmark tools read lines, and know `data: ` alone: a keep-alive is an empty line."""
    asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    with gateway.http.stream("POST", path, json={**asked, "stream": True}) as response:
        claimed = worker.take(worker.tokens[:2])
        wait_for_keep_alives(gateway)
        worker.say(claimed, worker.tokens[2:], end="stop")
        text = response.read().decode()
    assert "\n\n\n" in text and text.endswith("\n\n")
    events = [line for line in text.split("\n") if line]
    assert all(event.startswith("data: ") for event in events) and text.count("\n\n") >= len(events)
    opening, end, done = int("chat" in path), 1, 1
    assert len(events) == opening + len(worker.tokens) + end + done, "one for each position, also without text"
    assert events[-1] == "data: [DONE]"


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "stream": True}


def test_a_chat_begins_with_its_first_token_and_headers_tell_what_is_known_before(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    """Benchmark tools take the first event for the first token."""
    with gateway.http.stream("POST", "/v1/chat/completions", json={**CHAT, "seed": 7, "max_tokens": 9}) as response:
        assert (response.headers["x-blockrelay-seed"], response.headers["x-blockrelay-max-tokens"]) == ("7", "9")
        (claimed,) = worker.claim()
        assert response.headers["x-request-id"] == worker.public(claimed)
        wait_for_keep_alives(gateway)
        worker.say(claimed, worker.tokens[:1])
        first = next(chunk for chunk in response.iter_raw() if chunk.strip())
        role, token = [json.loads(line[6:]) for line in first.splitlines() if line.startswith(b"data: ")]
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert (role["choices"][0]["seed"], role["choices"][0]["max_tokens"]) == (7, 9)
        assert "role" not in token["choices"][0]["delta"]
        worker.say(claimed, worker.tokens[1:], end="stop")


@pytest.mark.parametrize(("end", "roles"), [("error", 0), ("length", 1)])
def test_a_chat_without_a_token_has_a_role_only_where_it_ends_well(
    gateway: RunningGateway, worker: PlayedWorker, end: EndReason, roles: int
) -> None:
    with gateway.http.stream("POST", "/v1/chat/completions", json=CHAT) as response:
        worker.take([], end=end)
        events = [event.data for event in read_events(response)]
    assert len(events) == roles + 2
    assert [one["choices"][0]["delta"].get("role") for one in events[:roles]] == ["assistant"] * roles
    assert ("error" in events[0]) == (not roles)


@pytest.mark.parametrize("header", [{"idempotency-key": "k"}, {"last-event-id": "0"}, {}])
def test_who_can_resume_gets_ids(gateway: RunningGateway, worker: PlayedWorker, header: dict[str, str]) -> None:
    body: dict[str, Any] = {"prompt": "x", "stream": True} if header else WITH_IDS
    with (
        answering(worker, lambda _: (worker.tokens, "stop")),
        gateway.http.stream("POST", "/v1/completions", json=body, headers=header) as response,
    ):
        text = response.read().decode()
    assert text.startswith("retry: 1000\nid: ") and text.count("\nid: ") == len(worker.tokens) + 1


def test_every_event_may_have_its_own_usage(gateway: RunningGateway, worker: PlayedWorker) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with answering(worker, lambda _: (worker.tokens, "stop")):
        events = stream(gateway, prompt=[[5, 6], [7]], stream_options=options)
    *chunks, usage, _ = [event.data for event in events]
    seen = {0: 0, 1: 0}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        seen[choice["index"]] += choice["finish_reason"] is None
        told, prompt = chunk["usage"], 2 - choice["index"]
        assert (told["prompt_tokens"], told["completion_tokens"]) == (prompt, seen[choice["index"]])
        assert told["total_tokens"] == prompt + told["completion_tokens"]
    assert seen == {0: len(worker.tokens), 1: len(worker.tokens)}
    assert usage["usage"]["completion_tokens"] == 2 * len(worker.tokens) and usage["choices"] == []
    name = chunks[0]["id"]
    params = {"continuous_usage_stats": True, "include_usage": True}
    with gateway.http.stream("GET", f"/v1/requests/{name}/events", params=params) as response:
        assert sorted(str(e.data) for e in read_events(response)) == sorted(str(e.data) for e in events)
