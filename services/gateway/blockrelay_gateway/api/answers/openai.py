"""The answers of OpenAI's routes."""

from typing import Any, Literal

from pydantic import Field

from blockrelay_gateway.api.answers.parts import (
    USAGE,
    Answer,
    FallbackEvent,
    InForce,
    ListedToken,
    MessageCall,
    PromptLogprobs,
    Status,
    Usage,
)
from blockrelay_gateway.api.common_schemas import example

FinishReason = Literal["stop", "length", "tool_calls"]
_IDS = "if the request has return_token_ids, and where the model has no tokenizer"
_HEAD: dict[str, Any] = {"created": 1790000000, "model": "storyteller", "system_fingerprint": "x86_64-w8a8-2"}
_CHOICE: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None, "seed": 7, "max_tokens": 4}


class Head(Answer):
    """What all answers of OpenAI's routes begin with."""

    id: str = Field(description="names the request under /v1/requests too")
    created: int = Field(description="Unix seconds")
    model: str
    system_fingerprint: str | None = Field(
        description="numerics ids of the workers that computed it; null: none began yet"
    )


class Whole(Head):
    """What whole answers of OpenAI's routes have in common."""

    usage: Usage
    fallback_events: list[FallbackEvent]


class Choice(InForce):
    """What choices of completions and chats have in common."""

    index: int
    finish_reason: FinishReason | None
    token_ids: list[int] | None = Field(default=None, description=_IDS)
    prompt_token_ids: list[int] | None = Field(default=None, description=_IDS)


class ListedTokens(Answer):
    """Log probabilities in the older form; all lists have one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for the first token of an echoed prompt")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="characters of the text before the token's")


class CompletionChoice(Choice):
    """One answer to a prompt."""

    text: str
    logprobs: ListedTokens | None
    prompt_logprobs: PromptLogprobs | None = Field(default=None, description="if the request asks for them")


class Completion(Whole):
    """A whole answer of POST /v1/completions."""

    model_config = example(
        id="cmpl-5f1c0a",
        object="text_completion",
        **_HEAD,
        choices=[{**_CHOICE, "text": " there was a girl"}],
        usage=USAGE,
        fallback_events=[],
    )

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ListedChatToken(ListedToken):
    """A new token of a chat, and the most likely ones in its place."""

    top_logprobs: list[ListedToken]


class ChatTokens(Answer):
    """Log probabilities of a chat's answer."""

    content: list[ListedChatToken]
    refusal: None


class Message(Answer):
    """What the assistant answers."""

    role: Literal["assistant"]
    content: str | None = Field(description="null where the answer is calls alone")
    refusal: None
    tool_calls: list[MessageCall] | None = Field(default=None, description="where the answer calls tools")
    reasoning_content: str | None = Field(default=None, description="what the model wrote before its answer to think")


class ChatChoice(Choice):
    """One answer to a conversation."""

    message: Message
    logprobs: ChatTokens | None


class ChatCompletion(Whole):
    """A whole answer of POST /v1/chat/completions."""

    model_config = example(
        id="chatcmpl-5f1c0a",
        object="chat.completion",
        **_HEAD,
        choices=[{**_CHOICE, "message": {"role": "assistant", "content": "Hello! I am", "refusal": None}}],
        usage=USAGE,
        fallback_events=[],
    )

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = Field(default=None, description="if the request asks for them")


class QueuedText(Head, InForce):
    """The answer to a request that runs in the background. With several choices, it is about the first."""

    model_config = example(
        id="cmpl-5f1c0a", object="text_completion", **_HEAD, status="queued", background=True, seed=7, max_tokens=4
    )

    object: Literal["text_completion", "chat.completion"]
    status: Status
    background: Literal[True]
