"""The answers below /v1/requests/{request_id}."""

from typing import Any, Literal

from pydantic import Field

from blockrelay_gateway.api.answers.openai import FinishReason
from blockrelay_gateway.api.answers.parts import Answer, FallbackEvent, InForce, MessageCall, Status, Usage
from blockrelay_gateway.api.common_schemas import example
from blockrelay_gateway.http.openapi import ErrorDetail

_COUNTS = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}


class TimelineEvent(Answer):
    """Something that happened to a request; which further fields there are depends on the event."""

    event: Literal[
        "accepted",
        "queued",
        "claimed",
        "first_token",
        "rerun",
        "numerics_changed",
        "fallback",
        "fallback_denied",
        "end",
    ]
    at_ms: int = Field(description="Unix milliseconds")
    route_class: str | None = Field(default=None, description="of claimed")
    reason: str | None = Field(default=None, description="of rerun, fallback and end")
    tokens: int | None = Field(default=None, description="of rerun and numerics_changed: new tokens before it")
    numerics_id: str | None = None
    block_id: str | None = Field(default=None, description="of fallback and fallback_denied")
    blocks: list[str] | None = Field(default=None, description="of fallback")
    error_code: str | None = Field(default=None, description="of fallback")


class RequestView(InForce):
    """The answer of GET /v1/requests/{request_id}, and to a cancellation."""

    model_config = example(
        id="cmpl-5f1c0a",
        object="request",
        request_id="req-5f1c0a",
        choices=["req-5f1c0a"],
        status="completed",
        created=1790000000,
        model="storyteller",
        background=True,
        text=" there was a girl",
        token_ids=[95, 61, 12, 340],
        finish_reason="length",
        usage=_COUNTS,
        seed=7,
        max_tokens=4,
        system_fingerprint="x86_64-w8a8-2",
        waits_for_numerics_id=None,
        timeline=[
            {"event": "accepted", "at_ms": 1790000000000},
            {"event": "end", "at_ms": 1790000000250, "reason": "length"},
        ],
        reruns=0,
        fallback_events=[],
        error=None,
    )

    id: str = Field(description="as the client wrote it")
    object: Literal["request"]
    request_id: str
    choices: list[str] = Field(description="request ids of all choices")
    status: Status
    created: int = Field(description="Unix seconds")
    model: str
    background: bool
    text: str
    reasoning_content: str | None = Field(default=None, description="the part of the text that is reasoning")
    tool_calls: list[MessageCall] | None = Field(default=None, description="where the text calls tools")
    token_ids: list[int]
    finish_reason: FinishReason | None
    usage: Usage
    system_fingerprint: str | None
    waits_for_numerics_id: str | None = Field(description="no worker with these numbers is there")
    timeline: list[TimelineEvent] = Field(description="in the order in which it happened")
    reruns: int
    fallback_events: list[FallbackEvent]
    error: ErrorDetail | None


class TraceEvent(Answer):
    """An event of the trace event format."""

    ph: Literal["M", "X", "i"]
    name: str
    pid: int
    tid: int
    args: dict[str, Any]
    cat: str | None = None
    ts: float | None = Field(default=None, description="Unix microseconds")
    dur: float | None = Field(default=None, description="microseconds")
    s: Literal["t"] | None = None


class Trace(Answer):
    """The answer of GET /v1/requests/{request_id}/trace, in the trace event format."""

    model_config = example(
        displayTimeUnit="ms",
        traceEvents=[{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "request req-5f1c0a"}}],
    )

    displayTimeUnit: Literal["ms"]
    traceEvents: list[TraceEvent]


class RanStage(Answer):
    """A worker that computed some blocks of a run."""

    blocks: str
    worker: str
    device: str
    epoch: int = Field(description="number of the plan; 0: unknown")
    numerics: str


class Run(Answer):
    """A run of a request: it computed the new tokens from `begin` on, before `end`."""

    begin: int
    end: int
    attempt: int = Field(description="1: the first run")
    stages: list[RanStage]


class Provenance(Answer):
    """The answer of GET /v1/requests/{request_id}/provenance."""

    model_config = example(
        id="cmpl-5f1c0a",
        object="request.provenance",
        request_id="req-5f1c0a",
        completion_tokens=4,
        runs=[
            {
                "begin": 0,
                "end": 4,
                "attempt": 1,
                "stages": [
                    {"blocks": "1-8", "worker": "host-1-0", "device": "cpu", "epoch": 1, "numerics": "x86_64-w8a8-2"}
                ],
            }
        ],
    )

    id: str
    object: Literal["request.provenance"]
    request_id: str
    completion_tokens: int
    runs: list[Run]
