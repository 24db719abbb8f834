"""The bodies of the tokenizer's routes as pydantic models: types and names only."""

from typing import Any

from pydantic import Field

from blockrelay_gateway.api.common_schemas import Strict, example
from blockrelay_gateway.api.openai.schemas import ChatMessage
from blockrelay_gateway.api.openai.tools.schemas import Tool


class TokenizeRequest(Strict):
    """POST /tokenize: a text in `prompt`, or a chat in `messages`."""

    model_config = example(prompt="Once upon a time")

    model: str | None = Field(default=None, description="the model that is served, or leave it out")
    prompt: str | None = Field(default=None, description="a text; or send messages")
    messages: list[ChatMessage] | None = Field(
        default=None, description="a conversation, rendered by the model's chat template; or send prompt"
    )
    add_special_tokens: bool | None = Field(
        default=None,
        description="tokens that the tokenizer adds to each text, such as a BOS; default: true for prompt, false for "
        "messages, whose template writes its own",
    )
    return_token_strs: bool | None = Field(
        default=None, description="the tokens as the vocabulary spells them too, in `token_strs`"
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="of messages; false: the prompt ends behind the last message"
    )
    continue_final_message: bool | None = Field(
        default=None, description="of messages, with add_generation_prompt: false: it ends within the last message"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="of messages: variables of the chat template"
    )
    tools: list[Tool] | None = Field(default=None, description="of messages: functions that the template shows")


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model_config = example(tokens=[1, 2, 3])

    model: str | None = Field(default=None, description="the model that is served, or leave it out")
    tokens: Any = Field(description="a list of token ids")
