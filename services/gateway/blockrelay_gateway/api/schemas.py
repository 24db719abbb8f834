"""What clients send, as pydantic models: types and names only, no meaning (that is `translate`).

Unknown fields are errors: a field that is silently ignored is a promise broken. Fields of OpenAI's that we lack are
declared in `UnsupportedFields` and may carry their neutral values.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from blockrelay.errors import BadRequest


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(_Strict):
    include_usage: bool | None = None
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


class UnsupportedFields(_Strict):
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
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check_neutral(self) -> None:
        """Raise BadRequest, naming the first field that asks for something we do not do."""
        for name, accepted in NEUTRAL.items():
            value = getattr(self, name)
            if value is None or any(_same(value, neutral) for neutral in accepted):
                continue
            allowed = " or ".join(repr(neutral) for neutral in accepted) or "null"
            raise BadRequest(f"{name} is not supported: leave it out or send {allowed}", param=name)


class SamplingFields(_Strict):
    """What all three kinds of text requests share. None = the default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="keep the k most likely tokens; 0 or -1 = all")
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    background: bool | None = Field(default=None, description="answer at once; read the result from /v1/requests/{id}")
    priority: int | None = Field(default=None, description="lower is earlier; the key says how low")
    timeout: float | None = Field(default=None, description="seconds; the request ends with an error after that")
    cache_salt: str | None = Field(default=None, description="KV pages are shared only among requests of equal salt")
    exact: bool | None = Field(default=None, description="end rather than go on under another numerics id")


class CompletionRequest(SamplingFields, UnsupportedFields):
    """POST /v1/completions."""

    prompt: Any = Field(description="text, token ids, a list of texts or a list of lists of token ids")
    logprobs: int | None = None
    stream_options: StreamOptions | None = None


class ChatMessage(_Strict):
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

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream_options: StreamOptions | None = None


class InferRequest(SamplingFields):
    """POST /v1/infer and every message on its WebSocket: the tensor form or the text form."""

    id: str | int | None = Field(default=None, description="WebSocket only: comes back in every answer to this message")
    idempotency_key: str | None = Field(default=None, description="WebSocket only: as the header Idempotency-Key")
    prompt: str | list[int] | None = None
    session_id: str | None = None
    step: int | None = None
    input_tensors: dict[str, Any] | None = None
    logits: Literal["last", "all"] | None = None


#: Fields of InferRequest that the tensor form knows.
TENSOR_FIELDS = frozenset(
    {
        "id",
        "idempotency_key",
        "model",
        "session_id",
        "step",
        "input_tensors",
        "logits",
        "priority",
        "timeout",
        "cache_salt",
        "exact",
    }
)
#: Fields of InferRequest that the text form does not know.
TENSOR_ONLY_FIELDS = frozenset({"session_id", "step", "input_tensors", "logits"})


def _same(value: object, neutral: object) -> bool:
    """Equal as JSON: true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
