"""Tool calls of the bundled model through whole systems, by the `openai` package and by plain events."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from openai import OpenAI

from blockrelay.settings import BUNDLED_MODEL
from tests.support.systems.up_process import UpProcess, running_up

MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a dog."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
ONE_CALL: Any = {"model": "storyteller", "messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def up() -> Iterator[UpProcess]:
    with running_up(BUNDLED_MODEL, "--stages", "2") as process:
        yield process
        assert process.stop() == 0


@pytest.fixture
def client(up: UpProcess) -> OpenAI:
    return OpenAI(base_url=f"{up.url}/v1", api_key="unused", max_retries=0)


def check(call: Any) -> None:
    assert re.fullmatch("[a-zA-Z0-9]{9}", call.id) and call.type == "function"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "now":
        assert arguments == {}
    else:
        assert call.function.name == "weather"
        Draft202012Validator({**SCHEMA, "additionalProperties": False}).validate(arguments)


@pytest.mark.parametrize("seed", range(5))
def test_required_calls_fit_their_schema(client: OpenAI, seed: int) -> None:
    answer = client.chat.completions.create(**ONE_CALL, tool_choice="required", seed=seed, temperature=1)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    check(call)
    with client.chat.completions.stream(**ONE_CALL, tool_choice=WEATHER, seed=seed, temperature=1) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and streamed.message.tool_calls
    check(streamed.message.tool_calls[0])
    whole = client.chat.completions.create(**ONE_CALL, tool_choice=WEATHER, seed=seed, temperature=1).choices[0]
    assert whole.message.tool_calls
    assert whole.message.tool_calls[0].function.arguments == streamed.message.tool_calls[0].function.arguments  # pyright: ignore


def test_a_conversation_goes_on_behind_a_call(client: OpenAI) -> None:
    first = client.chat.completions.create(**ONE_CALL, tool_choice="required").choices[0].message
    assert first.tool_calls
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
    messages: Any = [*MESSAGES, first.model_dump(), result]
    second = client.chat.completions.create(model="storyteller", messages=messages, max_tokens=8)
    assert second.choices[0].message.content and second.choices[0].finish_reason == "length"


def test_with_auto_the_model_may_answer_with_text(client: OpenAI) -> None:
    choice = client.chat.completions.create(**ONE_CALL, max_tokens=8).choices[0]
    assert choice.message.content and choice.message.tool_calls is None and choice.finish_reason == "length"


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    """The ids and the choices of a stream."""
    found: list[tuple[str, Any]] = []
    name = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            name = line[4:]
        if line.startswith("data: {"):
            found.append((name, json.loads(line[6:])["choices"][0]))
    return found


def test_a_stream_goes_on_behind_any_event(up: UpProcess) -> None:
    asked = {**ONE_CALL, "tool_choice": WEATHER, "stream": True, "stream_options": {"event_ids": True}}
    with (
        httpx.Client(base_url=up.url, timeout=60) as api,
        api.stream("POST", "/v1/chat/completions", json=asked) as one,
    ):
        request_id = one.headers["x-request-id"].replace("req-", "chatcmpl-")
        whole = events(one)
        for at in range(0, len(whole), 7):
            rest = events(api.get(f"/v1/requests/{request_id}/events", headers={"Last-Event-ID": whole[at][0]}))
            assert rest == whole[at + 1 :], "every delta is the one of its position"
        shown = api.get(f"/v1/requests/{request_id}").json()
    heads = [call for _, choice in whole for call in choice["delta"].get("tool_calls", []) if "id" in call]
    assert [call["index"] for call in heads] == list(range(len(heads))) and len(heads) == 1
    assert whole[-1][1]["finish_reason"] == "tool_calls"
    assert shown["tool_calls"][0]["id"] == heads[0]["id"] and shown["finish_reason"] == "tool_calls"


def test_an_answer_that_ends_within_a_call_says_so(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ONE_CALL, tool_choice=WEATHER)
    assert whole.usage
    limit = whole.usage.completion_tokens - 15
    choice = client.chat.completions.create(**ONE_CALL, tool_choice=WEATHER, max_tokens=limit).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls
    begun, ended = choice.message.tool_calls[0], whole.choices[0].message.tool_calls
    assert ended and ended[0].function.arguments.startswith(begun.function.arguments)  # pyright: ignore
    assert ended[0].function.arguments != begun.function.arguments  # pyright: ignore
