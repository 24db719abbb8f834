"""What OpenAI's clients send, as pydantic models: types and names only (what they mean: `requests`).

Fields of OpenAI's that we lack are declared in `UnsupportedFields` and may carry their neutral values.
"""

from typing import Any, Literal

from pydantic import Field

from blockrelay.errors import BadRequest
from blockrelay_gateway.api.common_schemas import SamplingFields, Strict


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
    include_obfuscation: Literal[False] | None = None


#: Values that change nothing, by field. Anything else is refused by name.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}


class UnsupportedFields(Strict):
    """OpenAI's and vLLM's fields that we lack: null or a neutral value (see NEUTRAL)."""

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
    service_tier: Any = None
    user: str | None = Field(default=None, description="taken and not used")
    safety_identifier: str | None = Field(default=None, description="taken and not used")
    prompt_cache_key: str | None = Field(
        default=None, description="taken and not used: pages are found by their tokens"
    )

    def check_neutral(self) -> None:
        """Raise BadRequest, naming the first field that asks for something we do not do."""
        for name, accepted in NEUTRAL.items():
            value = getattr(self, name)
            if value is None or any(_same(value, neutral) for neutral in accepted):
                continue
            allowed = " or ".join(repr(neutral) for neutral in accepted) or "null"
            raise BadRequest(f"{name} is not supported: leave it out or send {allowed}", param=name)


class CompletionRequest(SamplingFields, UnsupportedFields):
    """POST /v1/completions."""

    prompt: Any = Field(description="text, token ids, a list of texts or a list of lists of token ids")
    logprobs: int | None = Field(
        default=None, description="log probabilities of each new token and of so many of the likeliest, 0 to 20"
    )
    stream_options: StreamOptions | None = Field(default=None, description="of a stream")


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Any = Field(description="text, or a list of parts of type text")
    name: str | None = None
    refusal: Any = None
    audio: Any = None
    tool_calls: Any = None
    function_call: Any = None
    annotations: Any = None


class ChatRequest(SamplingFields, UnsupportedFields):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(description="the conversation so far, rendered by the model's chat template")
    max_completion_tokens: int | None = Field(default=None, description="max_tokens by OpenAI's newer name")
    logprobs: bool | None = Field(default=None, description="log probabilities of each new token")
    top_logprobs: int | None = Field(default=None, description="with logprobs: so many of the likeliest too, 0 to 20")
    stream_options: StreamOptions | None = Field(default=None, description="of a stream")


def _same(value: object, neutral: object) -> bool:
    """Equal as JSON: true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
