"""The bodies of OpenAI's APIs as pydantic models: types and names only; `requests` says what they mean."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from blockrelay_gateway.api.common_schemas import SamplingFields, Strict, Whole


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


class UnusedFields(Strict):
    """Fields of OpenAI and vLLM that have no effect here; `strictness` refuses or ignores each."""

    n: Any = None
    best_of: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    length_penalty: Any = None
    logit_bias: Any = None
    echo: Any = None
    suffix: Any = None
    min_tokens: Any = None
    use_beam_search: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    store: Any = None
    metadata: Any = None
    client_metadata: Any = None
    service_tier: Any = None
    moderation: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


class CompletionRequest(SamplingFields, UnusedFields):
    """POST /v1/completions."""

    prompt: Any = Field(description="text, token ids, a list of texts or a list of lists of token ids")
    logprobs: Whole | None = Field(
        default=None,
        description="log probabilities of each new token and of so many of the likeliest, 0 to 20; the "
        "chosen one is always among them",
    )
    stream_options: StreamOptions | None = Field(default=None, description="of a stream")


class ChatMessage(Strict):
    """Other fields, of what a client was answered, may be there: they are ignored and named."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Any = Field(default=None, description="text, or a list of parts of type text")
    name: str | None = Field(default=None, description="for the chat template, which may do nothing with it")


class ChatRequest(SamplingFields, UnusedFields):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(description="the conversation so far, rendered by the model's chat template")
    max_completion_tokens: Whole | None = Field(default=None, description="max_tokens by OpenAI's newer name")
    logprobs: bool | None = Field(default=None, description="log probabilities of each new token")
    top_logprobs: Whole | None = Field(default=None, description="with logprobs: so many of the likeliest too, 0 to 20")
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
