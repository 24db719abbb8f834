"""Reasoning models: what stands between their tags is no content, in whole answers and at any position of a stream."""

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.messages import RequestBody
from blockrelay.settings import GatewaySettings
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.openai.answer_parts import cutter_of, delta_of, message_of
from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.openai.reasoning import BEGUN, MAY_BEGIN, behind_prompt, within
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.openai.tools.formats import HERMES, LLAMA, MISTRAL_ARGS, CallForm
from tests.support.gateway.openai_requests import chat
from tests.support.gateway.played import PlayedWorker, answering, running_gateway

#: As Qwen 3 has it: reasoning unless the client switches it off, and that of earlier answers as the client sends it.
TEMPLATE = """\
{%- for message in messages -%}
{{ message.role }}: {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}
{% endfor -%}
{%- if add_generation_prompt %}assistant: {% endif -%}
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif -%}"""
#: As DeepSeek R1 and QwQ have it.
BEGINS = TEMPLATE.replace("assistant: {%", "assistant: <think>\n{%")
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
#: Text of an answer, the request's reasoning, and its parts: reasoning and content.
ANSWERS: dict[str, tuple[str, str, str, str | None]] = {
    "both": ("<think>\nhm, so\n\n</think>\n\nHi.\n", MAY_BEGIN, "hm, so", "Hi.\n"),
    "begun by the prompt": ("hm</think> Hi", BEGUN, "hm", "Hi"),
    "the tag again": ("<think>hm</think>", BEGUN, "<think>hm", None),
    "none": ("Hi <think>x</think>", MAY_BEGIN, "", "Hi <think>x</think>"),
    "blanks first": (" \n<think> hm </think>Hi", MAY_BEGIN, "hm", "Hi"),
    "cut off": ("<think>hm</thi", MAY_BEGIN, "hm</thi", None),
    "cut off in the tag": ("<thin", MAY_BEGIN, "", "<thin"),
    "another tag": ("<thing>", MAY_BEGIN, "", "<thing>"),
    "empty": ("<think>\n\n</think>\n\nHi", MAY_BEGIN, "", "Hi"),
    "nothing": ("", MAY_BEGIN, "", ""),
    "a second part": ("<think>a</think>b<think>c</think>", MAY_BEGIN, "a", "b<think>c</think>"),
}


def joined(deltas: list[dict[str, Any]], name: str) -> str:
    return "".join(delta.get(name, "") for delta in deltas)


@pytest.mark.parametrize("name", ANSWERS)
def test_parts_are_a_function_of_the_text(name: str) -> None:
    text, reasoning, thought, content = ANSWERS[name]
    message, _ = message_of(text, "", reasoning, "r")
    assert message == {"content": content} | ({"reasoning_content": thought} if thought else {})
    for seed in range(20):
        cuts = sorted(Random(seed).choices(range(len(text) + 1), k=seed % 5))
        cutter = cutter_of("", reasoning)
        assert cutter is not None
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        deltas = [delta_of(cutter.push(part), "r") for part in parts] + [delta_of(cutter.finish(), "r")]
        assert (joined(deltas, "reasoning_content"), joined(deltas, "content")) == (thought, content or "")


@pytest.mark.parametrize("before", ["<think>\nhm\n</think>\n\n", "<think>hm ", "<think>hm</thi", "<think>"])
@pytest.mark.parametrize("form", [HERMES, MISTRAL_ARGS], ids=lambda form: form.name)
def test_calls_end_the_reasoning_in_which_they_stand(before: str, form: CallForm) -> None:
    call = CALL if form is HERMES else "[TOOL_CALLS]f[ARGS]{}"
    message, whole = message_of(before + call, form.name, MAY_BEGIN, "r")
    assert whole and message["content"] is None
    assert message.get("reasoning_content", "") in before
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": "{}"}
    cutter = cutter_of(form.name, MAY_BEGIN)
    assert cutter is not None
    deltas = [delta_of(cutter.push(letter), "r") for letter in before + call]
    assert joined(deltas, "reasoning_content") == message.get("reasoning_content", "")
    assert not joined(deltas, "content") and any("tool_calls" in delta for delta in deltas)


@pytest.mark.parametrize("answer", ['{"a": 1}', "<|python_tag|>x", "Hi"])
def test_calls_that_lead_are_none_behind_reasoning(answer: str) -> None:
    expected = {"content": answer, "reasoning_content": "hm"}
    assert message_of(f"<think>hm</think>\n{answer}", LLAMA.name, MAY_BEGIN, "r") == (expected, False)
    assert message_of(f"hm</think>{answer}", LLAMA.name, BEGUN, "r") == (expected, False)
    _, whole = message_of('{"name": "f", "parameters": {}}', LLAMA.name, MAY_BEGIN, "r")
    assert whole


@pytest.mark.parametrize("text", ["<t", " ", "Hi <tool", ""])
def test_an_answer_that_ends_before_reasoning_or_calls_loses_nothing(text: str) -> None:
    assert message_of(text, HERMES.name, MAY_BEGIN, "r") == ({"content": text}, False)


@pytest.mark.parametrize(
    ("end", "expected"), [("assistant: ", MAY_BEGIN), ("a: <think>\n", BEGUN), ("<think>\n\n</think>\n\n", "")]
)
def test_the_prompt_says_whether_reasoning_has_begun(end: str, expected: str) -> None:
    assert behind_prompt(f"user: <think>\n{end}") == expected


@pytest.mark.parametrize(("message", "expected"), [("Hi", ""), ("<think>hm", BEGUN), ("<think>hm</think> H", "")])
def test_an_answer_that_goes_on_is_where_its_beginning_was(message: str, expected: str) -> None:
    assert within(message) == expected


def of_template(requests: OpenAIRequests, source: str, **fields: Any) -> str:
    asked = chat(replace(requests, template=ChatTemplate(source)), **fields)
    assert RequestBody.decode(asked.body.encode()).reasoning == asked.body.reasoning, "any gateway cuts it so"
    return asked.body.reasoning


def test_a_chat_has_the_reasoning_of_its_template(requests: OpenAIRequests) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert of_template(requests, "{{ messages }}") == ""
    assert of_template(requests, TEMPLATE) == MAY_BEGIN
    assert of_template(requests, TEMPLATE, chat_template_kwargs={"enable_thinking": False}) == ""
    assert of_template(requests, BEGINS) == BEGUN
    assert of_template(requests, TEMPLATE, add_generation_prompt=False) == ""
    assert of_template(requests, TEMPLATE, tools=tools) == MAY_BEGIN
    # A grammar holds from the first token on: such an answer is content, or calls, alone.
    assert of_template(requests, BEGINS, tools=tools, tool_choice="required") == ""
    assert of_template(requests, BEGINS, response_format={"type": "json_object"}) == ""


def test_earlier_reasoning_reaches_the_template(requests: OpenAIRequests, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Tom.", "reasoning_content": "hm"},
        {"role": "user", "content": "Why?"},
    ]
    asked = chat(replace(requests, template=ChatTemplate(TEMPLATE)), messages=messages)
    text = "user: Who?\nassistant: <think>hm</think>Tom.\nuser: Why?\nassistant: "
    assert asked.body.prompt.tolist() == tokenizer.encode(text, add_special_tokens=False)


def test_answers_streams_and_records_have_the_same_parts(
    settings: GatewaySettings, worker: PlayedWorker, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockFolder, "chat_template", lambda _: TEMPLATE)
    tokens = tokenizer.encode("<think>\nhm\n</think>\n\nHi.", add_special_tokens=False)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}]}
    with running_gateway(settings) as gateway, answering(worker, lambda _: (tokens, "stop")):
        answer = gateway.post("/v1/chat/completions", **body).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "Hi.")
        record = gateway.http.get(f"/v1/requests/{answer['id']}").json()
        assert (record["reasoning_content"], record["text"]) == ("hm", "<think>\nhm\n</think>\n\nHi.")
        for path in ("events", f"events?starting_after={len(tokens) - 2}"):
            stream = gateway.http.get(f"/v1/requests/{answer['id']}/{path}").text
            events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
            deltas = [event["choices"][0]["delta"] for event in events]
            assert "Hi.".endswith(joined(deltas, "content"))
            assert joined(deltas, "reasoning_content") == ("hm" if path == "events" else "")
