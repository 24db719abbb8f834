"""Text becomes tokens and back over HTTP, in the forms of vLLM, exactly as prompts do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockrelay.auth.api_keys import Tenant, add_key
from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BadRequest
from blockrelay.settings import GatewaySettings
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.tokenizer.answers import detokenized, tokenized, tokenizer_info
from blockrelay_gateway.api.tokenizer.schemas import DetokenizeRequest, TokenizeRequest
from tests.support.gateway.openai_requests import chat
from tests.support.gateway.played import PlayedWorker, RunningGateway, answering, running_gateway

CHAT = [{"role": "user", "content": "Who has the ball?"}]


def test_a_prompt_becomes_the_tokens_that_a_completion_has(
    gateway: RunningGateway, worker: PlayedWorker, folder: BlockFolder, tokenizer: Tokenizer
) -> None:
    with answering(worker, lambda _: ([5], "length")):
        asked = gateway.post("/v1/completions", prompt="Tom sat 🙂", max_tokens=1, return_token_ids=True).json()
    answer = gateway.post("/tokenize", prompt="Tom sat 🙂", model="tiny").json()
    tokens = asked["choices"][0]["prompt_token_ids"]
    assert answer == {
        "count": len(tokens),
        "max_model_len": folder.model.max_position,
        "tokens": tokens,
        "token_strs": None,
    }
    bare = gateway.post("/tokenize", prompt="Tom sat 🙂", add_special_tokens=False, return_token_strs=True).json()
    assert bare["tokens"] == tokenizer.encode("Tom sat 🙂", add_special_tokens=False)
    assert [tokenizer.token_id(name) for name in bare["token_strs"]] == bare["tokens"]


def test_a_chat_becomes_the_tokens_of_its_template(
    gateway: RunningGateway, worker: PlayedWorker, tokenizer: Tokenizer
) -> None:
    def same(**fields: Any) -> list[int]:
        """The tokens of both routes, which are the same."""
        messages = fields.pop("messages", CHAT)
        asked = gateway.post("/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True, **fields)
        tokens = asked.json()["choices"][0]["prompt_token_ids"]
        answer = gateway.post("/tokenize", messages=messages, **fields).json()
        assert answer["tokens"] == tokens and answer["count"] == len(tokens)
        return tokens

    with answering(worker, lambda _: ([5], "length")):
        answered, ended = same(), same(add_generation_prompt=False)
        begun = [*CHAT, {"role": "assistant", "content": "Lily"}]
        same(messages=begun, add_generation_prompt=False, continue_final_message=True)
    assert len(ended) < len(answered)
    doubled = gateway.post("/tokenize", messages=CHAT, add_special_tokens=True).json()["tokens"]
    bare = gateway.post("/tokenize", prompt="", add_special_tokens=True).json()["tokens"]
    assert doubled == [*bare, *answered]


def test_tools_are_counted_as_chats_show_them(requests: OpenAIRequests) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "of a ball"}}]
    body = TokenizeRequest.model_validate({"messages": CHAT, "tools": tools})
    tokens = json.loads(tokenized(requests, body, strict=False).json)["tokens"]
    assert tokens == chat(requests, messages=CHAT, tools=tools).body.prompt.tolist()
    with pytest.raises(BadRequest) as refused:
        tokenized(requests, TokenizeRequest.model_validate({"messages": CHAT, "tools": tools * 2}), strict=False)
    assert refused.value.param == "tools.1.function.name"
    with pytest.raises(BadRequest, match="tools is for messages"):
        tokenized(requests, TokenizeRequest.model_validate({"prompt": "a", "tools": tools}), strict=False)


@pytest.mark.parametrize("text", ["", "Tom sat down.", " two  spaces ", "🙂\n\ttabs", "<|endoftext|>x"])
def test_tokens_become_the_text_again(gateway: RunningGateway, text: str) -> None:
    tokens = gateway.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert gateway.post("/detokenize", tokens=tokens).json() == {"prompt": text}


def test_half_a_character_is_replaced(gateway: RunningGateway) -> None:
    tokens = gateway.post("/tokenize", prompt="🙂", add_special_tokens=False).json()["tokens"]
    assert len(tokens) > 1
    assert gateway.post("/detokenize", tokens=tokens[:-1]).json()["prompt"].endswith("\ufffd")


def test_the_tokenizer_tells_what_evaluations_ask_of_it(
    gateway: RunningGateway, folder: BlockFolder, tokenizer: Tokenizer
) -> None:
    info = gateway.http.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["model_max_length"] == folder.model.max_position
    assert (info["bos_token"], info["eos_token"]) == (folder.model.bos_token, folder.model.eos_token)
    assert info["chat_template"] == folder.chat_template()
    decoder = {int(token): one["content"] for token, one in info["added_tokens_decoder"].items()}
    assert decoder == tokenizer.added_tokens()
    (end,) = gateway.post("/tokenize", prompt=info["eos_token"], add_special_tokens=False).json()["tokens"]
    assert info["added_tokens_decoder"][str(end)]["special"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role"),
        ("/tokenize", {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages.0.tool_calls"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "x", "typo": 1}, "typo"),
        ("/tokenize", {"prompt": "x " * 30_000}, "prompt"),
        ("/detokenize", {"tokens": [1, 512]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_has_no_tokens_is_refused_by_name(
    gateway: RunningGateway, path: str, body: dict[str, Any], param: str
) -> None:
    answer = gateway.post(path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.json()


def test_another_model_is_not_found(gateway: RunningGateway) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        answer = gateway.post(path, model="other", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_fields_of_messages_that_change_nothing_are_named(gateway: RunningGateway) -> None:
    body = {"messages": [CHAT[0] | {"id": "x"}]}
    assert gateway.post("/tokenize", **body).headers["x-blockrelay-ignored"] == "messages.id"
    strict = gateway.http.post("/tokenize", json=body, headers={"blockrelay-strict": "true"})
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "messages.id")


def test_a_large_text_is_encoded_beside_the_event_loop(gateway: RunningGateway, tokenizer: Tokenizer) -> None:
    text = "Tom. " * 4000
    longest = gateway.gateway.builder.model.max_position
    assert len(text) > 16 << 10 and len(tokenizer.encode(text)) > 2 * longest
    refused = gateway.post("/tokenize", prompt=text)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    words = "Tom. " * 300
    assert gateway.post("/tokenize", prompt=words).json()["tokens"] == tokenizer.encode(words)


def test_a_model_without_tokenizer_or_template_says_so(requests: OpenAIRequests) -> None:
    mute = OpenAIRequests(replace(requests.builder, tokenizer=None), None)
    for ask, param in (
        (lambda: tokenized(mute, TokenizeRequest(prompt="x"), strict=False), "prompt"),
        (lambda: tokenized(mute, TokenizeRequest.model_validate({"messages": CHAT}), strict=False), "messages"),
        (lambda: detokenized(mute, DetokenizeRequest(tokens=[1])), "tokens"),
        (lambda: tokenizer_info(mute), "model"),
    ):
        with pytest.raises(BadRequest, match=r"has no (tokenizer|chat template)") as refused:
            ask()
        assert refused.value.param == param
    without_template = OpenAIRequests(requests.builder, None)
    assert tokenizer_info(without_template)["chat_template"] is None


def test_a_key_is_needed_where_there_are_keys(settings: GatewaySettings, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, Tenant(name="someone"))
    with running_gateway(settings.model_copy(update={"api_keys": file})) as gateway:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            assert gateway.post(path, **body).status_code == 401
            known = gateway.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
            assert known.status_code == 200
        assert gateway.http.get("/tokenizer_info").status_code == 401
