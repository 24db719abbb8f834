"""Builds the answers of the tokenizer's routes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from blockrelay.errors import BadRequest
from blockrelay_gateway.api.openai.requests import OpenAIRequests
from blockrelay_gateway.api.openai.schemas import ChatRequest
from blockrelay_gateway.api.openai.strictness import ignored_fields
from blockrelay_gateway.api.openai.tools.use import shown_tools
from blockrelay_gateway.api.tokenizer.schemas import DetokenizeRequest, TokenizeRequest
from blockrelay_gateway.http.errors import to_json

#: Fields of a body that only chats have.
_OF_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerAnswer:
    """The answer to a body, as JSON, with the names of the fields of its messages that change nothing."""

    json: bytes
    ignored: tuple[str, ...] = ()


def tokenized(requests: OpenAIRequests, body: TokenizeRequest, *, strict: bool) -> TokenizerAnswer:
    """The answer to POST /tokenize: `count`, `max_model_len`, `tokens` and, if asked for, `token_strs`.

    `strict`: fields of messages that change nothing are refused. Raises BadRequest, or NotFound for another model.
    """
    builder = requests.builder
    builder.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("send either prompt, a text, or messages, a chat", param="prompt")
    ignored: tuple[str, ...] = ()
    if body.prompt is not None:
        if named := next((name for name in _OF_CHATS if getattr(body, name) is not None), None):
            raise BadRequest(f"{named} is for messages, not for prompt", param=named)
        ids = builder.encode(body.prompt, "prompt", add_special_tokens=body.add_special_tokens is not False)
    else:
        chat = ChatRequest(
            messages=body.messages or [],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        ignored = ignored_fields(chat, strict=strict)
        tools = shown_tools(body.tools or [])
        ids = requests.chat_prompt(chat, add_special_tokens=bool(body.add_special_tokens), tools=tools)
    tokenizer = builder.tokenizer
    assert tokenizer is not None, "the text was encoded"
    content: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": builder.model.max_position,
        "tokens": ids,
        "token_strs": [tokenizer.name_of(token) for token in ids] if body.return_token_strs else None,
    }
    return TokenizerAnswer(json=to_json(content), ignored=ignored)


def detokenized(requests: OpenAIRequests, body: DetokenizeRequest) -> TokenizerAnswer:
    """The answer to POST /detokenize: the text in `prompt`, with the names of special tokens.

    Raises BadRequest for ids that the model does not have, and without a tokenizer; NotFound for another model.
    """
    builder = requests.builder
    builder.check_model(body.model)
    if builder.tokenizer is None:
        raise BadRequest("the model has no tokenizer: its tokens have no text", param="tokens")
    ids, vocabulary = body.tokens, builder.model.vocab_size
    if not isinstance(ids, list) or not all(type(token) is int for token in cast(list[object], ids)):
        raise BadRequest("tokens must be a list of token ids", param="tokens")
    known = cast(list[int], ids)
    for index, token in enumerate(known):
        if not 0 <= token < vocabulary:
            what = f"tokens: token id {token} at index {index} is not in 0..{vocabulary - 1}"
            raise BadRequest(what, param="tokens")
    return TokenizerAnswer(json=to_json({"prompt": builder.tokenizer.spell(known)}))


def tokenizer_info(requests: OpenAIRequests) -> dict[str, Any]:
    """The answer to GET /tokenizer_info, in the names of transformers' tokenizer_config.json.

    Special tokens that the model does not have are null. Raises BadRequest for a model without a tokenizer.
    """
    tokenizer, model = requests.builder.tokenizer, requests.builder.model
    if tokenizer is None:
        raise BadRequest("the model has no tokenizer: prompts are token ids", param="model")
    names: Sequence[str] = ("bos_token", "eos_token", "unk_token", "pad_token")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_position,
        **dict.fromkeys(names),
        **model.template_tokens,
        "added_tokens_decoder": {
            str(token): {"content": text, "special": text.encode() == tokenizer.token_bytes(token)}
            for token, text in tokenizer.added_tokens().items()
        },
        "chat_template": None if requests.template is None else requests.template.source,
    }
