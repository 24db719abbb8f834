"""What clients of /v1/infer send, as a pydantic model: types and names only."""

from typing import Any, Literal

from pydantic import Field

from blockrelay_gateway.api.common_schemas import SamplingFields


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
