"""A prompt comes in over HTTP, tokens come out of the log as text."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from blockrelay.text.tokenizer import Tokenizer
from tests.support.gateway.played import NUMERICS, PlayedWorker, RunningGateway, answering
from tests.support.gateway.streams import stream


def test_a_completion_is_the_text_of_the_committed_tokens(
    gateway: RunningGateway, worker: PlayedWorker, tokenizer: Tokenizer
) -> None:
    said = tokenizer.encode(" has a red ball.", add_special_tokens=False)
    with answering(worker, lambda _: (said, "length")):
        response = gateway.post("/v1/completions", prompt="Tom", max_tokens=len(said), seed=7, return_token_ids=True)
    answer = response.json()
    assert response.status_code == 200, answer
    (choice,) = answer["choices"]
    assert choice["text"] == " has a red ball."
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == said
    assert choice["prompt_token_ids"] == tokenizer.encode("Tom")
    assert choice["seed"] == 7
    assert answer["usage"]["completion_tokens"] == len(said)
    assert answer["usage"]["total_tokens"] == len(said) + len(tokenizer.encode("Tom"))
    assert answer["system_fingerprint"] == NUMERICS
    assert answer["model"] == "tiny"
    assert answer["id"] == "cmpl-" + response.headers["x-request-id"].removeprefix("req-")


def test_a_character_that_begins_in_the_prompt_is_text_of_the_answer(
    gateway: RunningGateway, worker: PlayedWorker, tokenizer: Tokenizer
) -> None:
    tokens = tokenizer.encode("x🙂y", add_special_tokens=False)
    cut = next(end for end in range(len(tokens)) if tokenizer.decode(tokens[:end]).endswith("\ufffd"))
    with answering(worker, lambda _: (tokens[cut:], "length")):
        answer = gateway.post("/v1/completions", prompt=tokens[:cut])
        events = stream(gateway, prompt=tokens[:cut])
    assert answer.json()["choices"][0]["text"] == "🙂y"
    assert "".join(event.data["choices"][0]["text"] for event in events[:-1]) == "🙂y"
    stored = gateway.http.get(f"/v1/requests/{answer.headers['x-request-id']}").json()
    assert stored["text"] == "🙂y"


def test_what_is_ignored_is_named_counted_and_refused_where_that_is_asked(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    body = {"prompt": "x", "user": "me", "metadata": {"a": "b"}, "service_tier": "auto"}
    with answering(worker, lambda _: ([5], "length")):
        answer = gateway.post("/v1/completions", **body)
        plain = gateway.post("/v1/completions", prompt="x")
    assert answer.headers["x-blockrelay-ignored"] == "metadata,user"
    assert "x-blockrelay-ignored" not in plain.headers
    for field, count in (("user", 1), ("metadata", 1), ("service_tier", 0)):
        assert gateway.metric("blockrelay_ignored_fields_total", field=field) == count
    refused = gateway.http.post("/v1/completions", json=body, headers={"blockrelay-strict": "true"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")


@pytest.mark.parametrize(("asked", "kept"), [({}, True), ({"use_cache": True}, True), ({"use_cache": False}, False)])
def test_a_request_may_do_without_a_cache(
    gateway: RunningGateway, worker: PlayedWorker, asked: dict[str, bool], kept: bool
) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: gateway.post("/v1/completions", prompt="Tom", **asked))
        (claimed,) = worker.claim()
        assert claimed.body.params["use_cache"] is kept
        worker.say(claimed, [5], end="stop")
        assert answer.result().status_code == 200
    assert gateway.post("/v1/completions", prompt="Tom", use_cache="no").status_code == 400


def test_a_large_prompt_is_tokenised_beside_the_event_loop_with_the_same_result(
    gateway: RunningGateway, worker: PlayedWorker, tokenizer: Tokenizer
) -> None:
    padding = {"user": "u" * (20 << 10)}
    with answering(worker, lambda _: ([5], "stop")):
        answer = gateway.post("/v1/completions", prompt="Tom", return_token_ids=True, **padding).json()
    assert answer["choices"][0]["prompt_token_ids"] == tokenizer.encode("Tom")


def test_the_usage_tells_how_much_of_the_prompts_was_found_instead_of_computed(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(gateway.post, "/v1/completions", prompt=[[7] * 40, [8] * 20], cache_salt="mine")
        for claimed, found in zip(worker.claim(2), (32, 16), strict=True):
            assert claimed.body.salt == "mine"
            worker.say(claimed, [5], end="stop", meta={"cached_tokens": found})
        answer = asked.result()
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
