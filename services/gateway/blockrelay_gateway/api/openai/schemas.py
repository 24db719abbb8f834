"""The bodies of OpenAI's APIs as pydantic models, and which values of their unused fields are refused or ignored."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, create_model

from blockrelay_gateway.api.common_schemas import SamplingFields, Strict, Whole, example
from blockrelay_gateway.api.openai.tools.schemas import Tool, ToolCall

#: The values of each field that leave the text as it is; all others are refused.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}
#: The values of each ignored field that ask for what is done anyway; the header does not name these.
IGNORED: Mapping[str, tuple[Any, ...]] = {
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "metadata": ({},),
    "client_metadata": ({},),
    "service_tier": ("auto", "default"),
    "moderation": (),
    "prediction": (),  # a guess that makes answers of OpenAI's faster, and never other ones
    "user": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
}


class StreamOptions(Strict):
    include_usage: bool | None = Field(default=None, description="one more event with the numbers of tokens")
    continuous_usage_stats: bool | None = Field(
        default=None, description="every event has the numbers of tokens up to its own"
    )
    event_ids: bool | None = Field(
        default=None,
        description="events have the ids with which a stream goes on elsewhere; they have them too where the request "
        "has an Idempotency-Key or a Last-Event-ID",
    )
    include_obfuscation: bool | None = Field(default=None, description="ignored, and named")


#: Fields of OpenAI and vLLM that have no effect here; `strictness` refuses or ignores each. The tables give their order
#: in /openapi.json.
_UNUSED: dict[str, Any] = dict.fromkeys((*REFUSED, *IGNORED), (Any, None))
UnusedFields: type[Strict] = create_model("UnusedFields", __base__=Strict, **_UNUSED)


_PROMPT_LOGPROBS = (
    "log probabilities of each token of the prompt but the first, and of so many of the likeliest in its place, 0 to "
    "20; not with stream or background"
)


class ChoiceFields(Strict):
    """The fields of OpenAI's APIs that ask for several answers to a prompt."""

    n: Whole | None = Field(
        default=None, description="answers to each prompt, 1 to 128 with those to all prompts; default 1"
    )
    best_of: Whole | None = Field(default=None, description="the same number as n: every answer is returned")


class CompletionRequest(SamplingFields, ChoiceFields, UnusedFields):
    """POST /v1/completions."""

    model_config = example(prompt="Once upon a time", max_tokens=16, temperature=0.7, seed=7)

    prompt: Any = Field(description="text, token ids, a list of texts or a list of lists of token ids")
    logprobs: Whole | None = Field(
        default=None,
        description="log probabilities of each new token and of so many of the likeliest, 0 to 20; the "
        "chosen one is always among them",
    )
    prompt_logprobs: Whole | None = Field(default=None, description=_PROMPT_LOGPROBS)
    echo: bool | None = Field(
        default=None,
        description="the text begins with that of the prompt, and with logprobs these begin with the prompt's; "
        "max_tokens may be 0 then; not with stream or background",
    )
    stream_options: StreamOptions | None = Field(default=None, description="of a stream")


#: Fields in REFUSED that chats have.
OF_CHATS = frozenset(("tools", "tool_choice", "parallel_tool_calls"))


class ChatMessage(Strict):
    """Other fields, of what a client was answered, may be there: they are ignored and named."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = Field(default=None, description="text, or a list of parts of type text")
    name: str | None = Field(default=None, description="for the chat template, which may do nothing with it")
    reasoning_content: str | None = Field(
        default=None, description="of the assistant: its reasoning, for the chat template, which may do nothing with it"
    )
    tool_calls: list[ToolCall] | None = Field(default=None, description="of the assistant: what it called")
    tool_call_id: str | None = Field(default=None, description="of a message of the role `tool`: which call it answers")


class ChatRequest(SamplingFields, ChoiceFields, UnusedFields):
    """POST /v1/chat/completions."""

    model_config = example(
        messages=[{"role": "user", "content": "Tell me of a garden."}], max_completion_tokens=16, temperature=0
    )

    messages: list[ChatMessage] = Field(description="the conversation so far, rendered by the model's chat template")
    tools: list[Tool] | None = Field(
        default=None, description="up to 128 functions that the model may call; needs `blockrelay[structured]`"
    )
    tool_choice: Any = Field(
        default=None,
        description="`auto` (default: text, calls, or both), `required` (calls), `none`, or one function, as "
        '`{"type": "function", "function": {"name": ...}}`',
    )
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call; default: any number")
    max_completion_tokens: Whole | None = Field(default=None, description="max_tokens by OpenAI's newer name")
    logprobs: bool | None = Field(default=None, description="log probabilities of each new token")
    top_logprobs: Whole | None = Field(default=None, description="with logprobs: so many of the likeliest too, 0 to 20")
    prompt_logprobs: Whole | None = Field(default=None, description=_PROMPT_LOGPROBS)
    echo: Literal[False] | None = Field(default=None, description="false, or leave it out")
    stream_options: StreamOptions | None = Field(default=None, description="of a stream")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="variables of the chat template, as `date_string` of Llama's"
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="false: the prompt ends behind the last message"
    )
    continue_final_message: bool | None = Field(
        default=None, description="with add_generation_prompt: false, go on within the last message, of the assistant"
    )
