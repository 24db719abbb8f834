"""The fields that text requests of all APIs share, as pydantic models: types and names only.

Unknown fields are errors: a field that is silently ignored is a promise broken.
"""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from blockrelay.protocol.encoding.fallback_policy import Fallback


def _whole(value: object) -> object:
    """Turns a float without a fraction into an int: JSON has one kind of number, and some clients write 2 as 2.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]


class Strict(BaseModel):
    """A model that converts no value to another type and refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


def example(**body: Any) -> ConfigDict:
    """Returns the configuration of a model with this example in /openapi.json."""
    return ConfigDict(json_schema_extra={"examples": [body]})


class MaxSlowdown(Strict):
    """A value of `fallback`: a CPU takes over only where it is predicted to be fast enough."""

    max_slowdown: float = Field(
        gt=0,
        allow_inf_nan=False,
        description="a CPU goes on if the stage is predicted to take at most that many times as long there as on the "
        "GPU that failed; else, or where nothing is predicted, the request ends with an error",
    )


def _form_of(fallback: object) -> str | None:
    """Returns the tag of the form that a value of `fallback` has; None: neither."""
    if isinstance(fallback, dict | MaxSlowdown):
        return "an object"
    return "a word" if fallback in get_args(Fallback) else None


AnyFallback = Annotated[
    Annotated[Fallback, Tag("a word")] | Annotated[MaxSlowdown, Tag("an object")],
    Discriminator(
        _form_of,
        custom_error_type="fallback",
        custom_error_message="Input should be 'allow', 'recompute', 'deny' or {\"max_slowdown\": NUMBER}",
    ),
]


class StructuredOutputs(Strict):
    """One of these."""

    json_schema: Any = Field(default=None, alias="json", description="a JSON schema, or the text of one")
    regex: str | None = Field(default=None, description="a regular expression that the whole text matches")
    choice: list[str] | None = Field(default=None, description="the text is one of these")
    grammar: str | None = Field(default=None, description="a grammar in Lark's notation or in GBNF")
    json_object: bool | None = Field(default=None, description="true: the text is any JSON object")


class SamplingFields(Strict):
    """The sampling fields that all APIs spell the same; None stands for the default."""

    model: str | None = Field(default=None, description="the model that is served, or leave it out")
    max_tokens: Whole | None = Field(
        default=None,
        description="new tokens at most, and no more than the context has room for; default: the model's, else "
        "BLOCKRELAY_DEFAULT_MAX_TOKENS, else 128, and for chats the rest of the context as far as pools allow",
    )
    temperature: float | None = Field(default=None, description="0 to 2, 0 = greedy; default: the model's, else 1")
    top_p: float | None = Field(
        default=None, description="then keep the fewest whose probability reaches this; 1 = all"
    )
    top_k: Whole | None = Field(default=None, description="keep the k most likely tokens; 0 or -1 = all")
    min_p: float | None = Field(
        default=None, description="then keep those at least so many times as likely as the best; 0 = all"
    )
    logit_bias: dict[str, float] | None = Field(
        default=None, description="token ids and what is added to their logits, -100 to 100; up to 1,024 tokens"
    )
    presence_penalty: float | None = Field(
        default=None, description="-2 to 2: subtracted from the logits of tokens that the answer has"
    )
    frequency_penalty: float | None = Field(
        default=None, description="-2 to 2: the same for each time that the answer has the token"
    )
    repetition_penalty: float | None = Field(
        default=None,
        description="above 0, at most 10: divides the logits above 0 of tokens of prompt and answer, and multiplies "
        "their other ones; 1 = no change; default: the model's, else 1",
    )
    min_tokens: Whole | None = Field(
        default=None,
        description="new tokens before which no end token and none of stop_token_ids is chosen, and no stop string "
        "ends the text",
    )
    bad_words: list[str] | None = Field(default=None, description="up to 32 words that the answer does not have")
    response_format: dict[str, Any] | None = Field(
        default=None,
        description='what the text is like: `{"type": "json_schema", "json_schema": {"schema": ...}}`, '
        "or `json_object`, or `text`; needs `blockrelay[structured]`",
    )
    structured_outputs: StructuredOutputs | None = Field(default=None, description="the same in vLLM's spelling")
    guided_json: Any = Field(default=None, description="`structured_outputs.json` in an older spelling of vLLM's")
    guided_regex: str | None = Field(default=None, description="`structured_outputs.regex` in the same spelling")
    guided_choice: list[str] | None = Field(default=None, description="`structured_outputs.choice` in it")
    guided_grammar: str | None = Field(default=None, description="`structured_outputs.grammar` in it")
    json_schema: dict[str, Any] | None = Field(
        default=None, description="`structured_outputs.json` as llama.cpp spells it"
    )
    grammar: str | None = Field(default=None, description="`structured_outputs.grammar` as llama.cpp spells it")
    seed: Whole | None = Field(
        default=None, description="of 64 bits; default: made from the id of the request, and returned"
    )
    stop: str | list[str] | None = Field(
        default=None,
        description="up to 16 strings that end the text and are not part of it; the name of a special token stands "
        "for the token",
    )
    stop_token_ids: list[Whole] | None = Field(default=None, description="up to 64 tokens that end the text")
    ignore_eos: bool | None = Field(default=None, description="the model's own end tokens do not end the text")
    use_cache: bool | None = Field(
        default=None, description="false: keep no KV between tokens and compute every step anew (slow; same tokens)"
    )
    stream: bool | None = Field(default=None, description="answer in events, piece by piece")
    return_token_ids: bool | None = Field(default=None, description="token ids of the prompt and of each piece too")
    background: bool | None = Field(default=None, description="answer at once; read the result from /v1/requests/{id}")
    priority: Whole | None = Field(default=None, description="lower is earlier; below 0 only with a key made for that")
    timeout: float | None = Field(default=None, description="seconds; the request ends with an error after that")
    cache_salt: str | None = Field(default=None, description="KV pages are shared only among requests of equal salt")
    exact: bool | None = Field(
        default=None, description="on no device whose bits vary; end rather than go on under another numerics id"
    )
    fallback: AnyFallback | None = Field(
        default=None,
        description="when a GPU fails: allow (default; a CPU goes on from KV pages at hand), recompute (it computes "
        "the prompt anew), deny (the request waits for a GPU, and ends with an error when none comes), or "
        '{"max_slowdown": 2.0} (as allow where a CPU is predicted to take at most twice as long, else an error)',
    )
    trace: bool | None = Field(
        default=None, description="every stage tells what it does for the request: GET /v1/requests/{id}/trace"
    )
