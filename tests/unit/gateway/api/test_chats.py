"""Chats become requests of ours: by the template, and every field means something or is refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from blockrelay.block_folder.manifest import GenerationDefaults
from blockrelay.errors import BadRequest
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.admission.idempotency import Identity
from blockrelay_gateway.api.client_headers import ClientHeaders
from blockrelay_gateway.api.openai.chat_template import ChatTemplate
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.openai.schemas import ChatRequest
from blockrelay_gateway.api.openai.strictness import header, ignored_fields
from tests.support.gateway.openai_requests import chat, complete


def test_a_chat_without_a_limit_is_open_ended_and_nothing_else_is(requests: OpenAIRequests) -> None:
    asked = chat(requests)
    assert asked.open_ended and asked.params.max_tokens == 512 - asked.body.prompt.size
    for fields in ({"max_tokens": 400}, {"max_completion_tokens": 4}):
        assert not chat(requests, **fields).open_ended
    assert not complete(requests).open_ended
    settled = OpenAIRequests(replace(requests.builder, default_max_tokens=7), requests.template)
    modest = OpenAIRequests(replace(requests.builder, generation=GenerationDefaults(max_tokens=9)), requests.template)
    for builder, most in ((settled, 7), (modest, 9)):
        assert (chat(builder).params.max_tokens, chat(builder).open_ended) == (most, False)
    limited = OpenAIRequests(replace(requests.builder, max_tokens_limit=11), requests.template)
    assert (chat(limited).params.max_tokens, chat(limited).open_ended) == (11, True)


def test_what_clients_send_back_of_a_message_is_ignored_and_named(requests: OpenAIRequests) -> None:
    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "x"}]
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    extras = [
        {**plain[0], "id": "m1", "opts": {"visible": True}, "refusal": None},
        {"role": "assistant", "content": None, "reasoning": "hm", "annotations": [], "tool_calls": None},
        {"role": "user", "content": [part], "straße": 1},
    ]
    request = ChatRequest.model_validate({"messages": extras})
    names = ("content.cache_control", "id", "opts", "reasoning", "stra?e")
    assert ignored_fields(request) == tuple(f"messages.{name}" for name in names)
    assert chat(requests, messages=extras).body.prompt.tolist() == chat(requests, messages=plain).body.prompt.tolist()
    many = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"} | {f"f{i}": 1 for i in range(50)}]}
    )
    (named,) = header(ignored_fields(many)).values()
    assert len(named.split(",")) == 20 and named.isascii()
    assert header(()) == {}


def test_a_chat_may_go_on_within_its_last_message(requests: OpenAIRequests, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It was Anna "}]
    went_on = chat(requests, messages=messages, continue_final_message=True, add_generation_prompt=False)
    text = "<s>user: Who?\nassistant: It was Anna "
    assert went_on.body.prompt.tolist() == tokenizer.encode(text, add_special_tokens=False)
    ends = chat(requests, messages=messages[:1], add_generation_prompt=False)
    assert ends.body.prompt.tolist() == tokenizer.encode("<s>user: Who?\n", add_special_tokens=False)


def test_clients_may_set_variables_of_the_template(requests: OpenAIRequests, tokenizer: Tokenizer) -> None:
    dated = replace(requests, template=ChatTemplate("{{ date_string }}"))
    asked = chat(dated, chat_template_kwargs={"date_string": "1 May 1999"})
    assert asked.body.prompt.tolist() == tokenizer.encode("1 May 1999", add_special_tokens=False)


def test_a_chat_is_the_template_with_its_own_special_tokens(requests: OpenAIRequests, tokenizer: Tokenizer) -> None:
    asked = chat(requests, messages=[
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "is it?"}]},
    ])  # fmt: skip
    text = "<s>system: Be brief.\nuser: Who is it?\nassistant:"
    assert asked.body.prompt.tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert asked.body.prompt.tolist().count(1) == 1, "one beginning, not two"


def test_the_day_is_in_the_prompt_only_without_a_key(requests: OpenAIRequests, tokenizer: Tokenizer) -> None:
    dated = replace(requests, template=ChatTemplate("{{ strftime_now('%d %b %Y') }}"))
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    keyed, unkeyed = (
        dated.chat(request, ClientHeaders(), Identity("req-1", fingerprint))[0] for fingerprint in ("fingerprint", "")
    )
    assert keyed.body.prompt.tolist() == tokenizer.encode("26 Jul 2024", add_special_tokens=False)
    assert unkeyed.body.prompt.tolist() != keyed.body.prompt.tolist()


def test_both_spellings_of_the_limit_are_taken(requests: OpenAIRequests) -> None:
    assert chat(requests, max_tokens=5).params.max_tokens == 5
    assert chat(requests, max_completion_tokens=6).params.max_tokens == 6
    assert chat(requests, max_tokens=7, max_completion_tokens=7).params.max_tokens == 7


BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "contradicting limits": ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    "no tokens in the new spelling": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "messages that are text": ({"messages": "hi"}, "messages"),
    "an unknown role": ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
    "a message without content": ({"messages": [{"role": "user"}]}, "messages.0.content"),
    "a message with content null": ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content",
    ),
    "a function call": (
        {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]},
        "messages.0.function_call",
    ),
    "a variable of the template that is ours": ({"chat_template_kwargs": {"tools": [1]}}, "chat_template_kwargs.tools"),
    "variables that are none": ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    "to go on and to answer": ({"continue_final_message": True}, "continue_final_message"),
    "to go on with what a user says": (
        {"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"
    ),
    "a tool call without an id": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]},
        "messages.0.tool_calls.0.id",
    ),
    "a tool that is no function": ({"tools": [{"type": "custom"}]}, "tools.0.type"),
    "a format": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "logprobs as a number": ({"logprobs": 3}, "logprobs"),
    "top_logprobs alone": ({"top_logprobs": 3}, "top_logprobs"),
    "too many top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "a prompt": ({"prompt": "x"}, "prompt"),
    "half a surrogate pair": ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages"),
    "more than the context": ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CHATS)
def test_a_bad_chat_is_refused_by_the_name_of_its_field(requests: OpenAIRequests, name: str) -> None:
    fields, param = BAD_CHATS[name]
    with pytest.raises(BadRequest) as refused:
        chat(requests, **fields)
    assert refused.value.param == param
    assert param.rpartition(".")[2] in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens must be at least 1, not 0"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be between 0 and 20, not 21"),
    ],
)
def test_a_chats_errors_use_the_clients_own_words(
    requests: OpenAIRequests, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(requests, **fields)
    assert str(refused.value) == message


def test_a_model_without_a_template_says_so(requests: OpenAIRequests) -> None:
    bare = replace(requests, template=None)
    with pytest.raises(BadRequest, match="no chat template") as refused:
        chat(bare)
    assert refused.value.param == "messages"
