"""The body of /v1/infer as a pydantic model: types and names only."""

from typing import Any, Literal

from pydantic import Field

from blockrelay_gateway.api.common_schemas import SamplingFields, Whole, example


class InferRequest(SamplingFields):
    """POST /v1/infer and every message on its WebSocket: the tensor form or the text form."""

    model_config = example(session_id="s1", step=1, input_tensors={"input_ids": [[1, 2, 3]]})

    id: str | int | None = Field(default=None, description="WebSocket only: comes back in every answer to this message")
    idempotency_key: str | None = Field(default=None, description="WebSocket only: as the header Idempotency-Key")
    prompt: str | list[int] | None = Field(default=None, description="text form: a text or token ids")
    session_id: str | None = Field(
        default=None,
        description="tensor form: whose KV cache the step goes on with; without one it is a session of one step",
    )
    step: Whole | None = Field(default=None, description="tensor form: 1, then one more each time")
    input_tensors: dict[str, Any] | None = Field(
        default=None,
        description="tensor form: input_ids, attention_mask and position_ids, each {shape, dtype, data} or a list; "
        "past_key_values.<layer>.key and .value of all layers, where a client has them",
    )
    logits: Literal["last", "all"] | None = Field(
        default=None, description="tensor form: of the last row (default) or of all"
    )
    blocks: str | None = Field(
        default=None,
        description="tensor form: of which blocks the answer has keys and values, `3` or `2-5`; default: of none",
    )


#: Fields of InferRequest that the text form refuses.
TENSOR_ONLY_FIELDS = frozenset({"session_id", "step", "input_tensors", "logits", "blocks"})
#: Fields of InferRequest that the tensor form takes.
TENSOR_FIELDS = TENSOR_ONLY_FIELDS | {
    "id",
    "idempotency_key",
    "model",
    "priority",
    "timeout",
    "cache_salt",
    "exact",
    "fallback",
    "trace",
}
