"""The answers of /v1/infer and of sessions."""

from typing import Any, Literal

from pydantic import Field

from blockrelay_gateway.api.answers.parts import USAGE, Answer, FallbackEvent, InForce, Status, Usage
from blockrelay_gateway.api.common_schemas import example
from blockrelay_gateway.http.openapi import Error

_NAMES: dict[str, Any] = {"status": "success", "message": "Pipeline completed successfully"}
_COUNTS: dict[str, Any] = {
    "gpu_blocks_executed": 0,
    "cpu_blocks_executed": 8,
    "total_fallbacks": 0,
    "successful_fallbacks": 0,
    "avg_block_time": 0.002,
    "cached_tokens": 0,
}
_EXECUTED: dict[str, Any] = {
    "execution_times": {"block_1": 0.002},
    "execution_stats": _COUNTS,
    "fallback_events": [],
    "total_pipeline_time": 0.012,
    "system_fingerprint": "x86_64-w8a8-2",
}


class ExecutionStats(Answer):
    """Counts of executed blocks, over all steps of the request."""

    gpu_blocks_executed: int
    cpu_blocks_executed: int
    total_fallbacks: int
    successful_fallbacks: int
    avg_block_time: float = Field(description="seconds")
    cached_tokens: int
    warm_sessions: dict[str, float] | None = Field(
        default=None, description="of ONNX blocks made elsewhere: sessions that their worker made and ran so far"
    )


class Executed(Answer):
    """What answers to both forms say of their execution."""

    status: Literal["success"]
    message: str
    total_pipeline_time: float = Field(description="seconds since it was accepted")
    system_fingerprint: str | None
    execution_times: dict[str, float] = Field(description="seconds in each block")
    execution_stats: ExecutionStats
    fallback_events: list[FallbackEvent]


class EncodedTensor(Answer):
    """A tensor as base64 of its little-endian elements in row-major order."""

    tensor: Literal[True] = Field(alias="_tensor_")
    dtype: str
    shape: list[int]
    data_b64: str


class TensorResult(Executed):
    """The answer to a tensor step."""

    model_config = example(
        **_NAMES,
        session_id="s1",
        step=1,
        outputs={"logits": {"_tensor_": True, "dtype": "float16", "shape": [1, 1, 2], "data_b64": "AAAAPA=="}},
        **_EXECUTED,
    )

    session_id: str | None
    step: int
    outputs: dict[str, EncodedTensor] = Field(
        description="`logits`, and `present.<layer>.key` and `.value` of the blocks that were asked for"
    )


class GeneratedText(Answer):
    text: str
    token_ids: list[int]


class TextResult(Executed, InForce):
    """The answer to the text form."""

    model_config = example(
        **_NAMES,
        request_id="req-5f1c0a",
        outputs={"text": " there was a girl", "token_ids": [95, 61, 12, 340]},
        finish_reason="length",
        usage=USAGE,
        seed=7,
        max_tokens=4,
        **_EXECUTED,
    )

    request_id: str
    outputs: GeneratedText
    finish_reason: Literal["stop", "length"] | None
    usage: Usage


class QueuedInfer(InForce):
    """The answer to a text form that runs in the background."""

    model_config = example(status="queued", request_id="req-5f1c0a", seed=7, max_tokens=4)

    status: Status
    request_id: str


class FailedBlock(Answer):
    """A block that failed."""

    block_id: str
    error: str
    execution_time: float
    worker: Literal["GPU", "CPU"]


class InferError(Error):
    """The error of /v1/infer, which includes OpenAI's shape."""

    status: Literal["error"]
    message: str
    session_id: str | None
    failed_block: str | None
    error_type: str
    successful_blocks: list[str]
    failed_blocks: list[FailedBlock]
    fallback_events: list[FallbackEvent] | None = Field(default=None, description="of a request that was accepted")


class SessionStage(Answer):
    """A worker of one stage, and the KV pages of a session there."""

    stage: int
    worker: str
    there: bool = Field(description="false: the worker is gone, or serves other blocks now")
    blocks: str | None
    device: str | None
    layers: int
    pages: int = Field(description="of one layer")
    kv_bytes: int = Field(description="of all layers")


class SessionView(Answer):
    """The answer of GET /v1/sessions/{session_id}."""

    model_config = example(
        object="session",
        session_id="s1",
        step=2,
        rows=1,
        tokens=[18],
        states=["completed"],
        stages=[
            {
                "stage": 0,
                "worker": "host-1-0",
                "there": True,
                "blocks": "1-8",
                "device": "cpu",
                "layers": 6,
                "pages": 2,
                "kv_bytes": 98304,
            }
        ],
    )

    object: Literal["session"]
    session_id: str
    step: int
    rows: int
    tokens: list[int] = Field(description="of each row")
    states: list[str] = Field(description="of each row's last request; empty text: it was forgotten")
    stages: list[SessionStage]
