"""The parts that several answers have: token counts, fallbacks, values in force, log probabilities."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """An answer, or a part of one, that has no other fields. Fields with a default may be left out."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


#: The status of a request.
Status = Literal["queued", "running", "completed", "cancelled", "expired", "failed"]


class CachedTokens(Answer):
    cached_tokens: int = Field(description="of prompts: found in KV pages, not computed")


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = Field(default=None, description="once the request has ended")


class FallbackEvent(Answer):
    """A stage whose device failed, and the device that took it over."""

    block_id: str = Field(description="the block that failed")
    blocks: list[str] = Field(description="all blocks of the stage")
    source: str = Field(alias="from", description="kind of the device that failed")
    to: str = Field(description="kind of the device that took over")
    reason: str
    error_code: str | None
    success: bool = Field(description="the other device computed the stage")
    position: int | None = Field(description="new tokens before the failure")
    rows_recomputed: int | None = Field(description="known tokens that were computed again")
    predicted_slowdown: float | None = Field(default=None, description="times as long as on the device that failed")
    seen_slowdown: float | None = Field(default=None, description="the same, as it was measured")


class InForce(Answer):
    """The values with which a request runs; the client may have left them open."""

    seed: int
    max_tokens: int


class ListedToken(Answer):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int] = Field(description="the token's bytes, which alone may not be UTF-8")


class PromptToken(Answer):
    """A token in a place of the prompt."""

    logprob: float
    rank: int = Field(description="1: the most likely token in its place")
    decoded_token: str | None


class MessageFunction(Answer):
    name: str
    arguments: str = Field(description="a JSON object as text")


class MessageCall(Answer):
    """A call of one of the request's tools."""

    id: str = Field(description="nine letters and digits, the same however often the answer is read")
    type: Literal["function"]
    function: MessageFunction


#: `prompt_logprobs` by token id, for each token of a prompt; null for its first.
PromptLogprobs = list[dict[str, PromptToken] | None]
#: Of examples: token counts, and no fallback.
USAGE: dict[str, Any] = {
    "prompt_tokens": 5,
    "completion_tokens": 4,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 0},
}
