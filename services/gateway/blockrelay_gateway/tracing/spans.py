"""Derives the spans of a request from its record. Pure: every process gets the same spans of an ended request.

The record outlives every process, so a trace also shows the run of a worker that was killed, which could not have
reported it. Times are of Redis' clock; those of the timeline (`records.timeline`) are whole milliseconds.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blockrelay.observability.traceparent import trace_and_parent
from blockrelay.protocol.messages import EndEntry, RequestBody
from blockrelay.protocol.records.timeline import timeline

Value = str | int | float | bool | list[str]

#: Version of OpenTelemetry's semantic conventions that has the names `gen_ai.*` and `error.type` as they are used here.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"
#: Reasons of ends that trace servers show as errors. A cancelled request is none: its client wanted that.
_FAILED = ("error", "expired")
#: The reasons for another run that are no failures: the worker drained, or the run gave its KV pages to an older one.
_PLANNED = ("drain", "preempted")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceIdentity:
    """The trace to which the spans of a request belong."""

    trace_id: str
    """32 hex digits."""
    parent_id: str
    """The client's span, 16 hex digits; "" if the client named none."""
    traceparent: str
    """The client's header, or ""; it also says if the client's trace is sampled."""

    @classmethod
    def of(cls, request_id: str, traceparent: str) -> "TraceIdentity":
        """The client's trace; without one, a trace of its own whose id derives from the request id."""
        trace_id, parent_id = trace_and_parent(traceparent)
        if not trace_id:
            return cls(trace_id=_digits(request_id, 32), parent_id="", traceparent="")
        return cls(trace_id=trace_id, parent_id=parent_id, traceparent=traceparent)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """An event at one moment of a span; its time is in Unix microseconds."""

    name: str
    at_us: int
    attributes: dict[str, Value]


@dataclass(slots=True, kw_only=True)
class Span:
    """One span of a request. Times are Unix microseconds; `span_id` and `parent_id` have 16 hex digits.

    The span of the whole request has the parent "" if the client named none.
    """

    name: str
    span_id: str
    parent_id: str
    start_us: int
    end_us: int
    server: bool = False
    """True for the span of the whole request (OpenTelemetry's kind SERVER)."""
    attributes: dict[str, Value] = field(default_factory=dict[str, Value])
    events: list[SpanEvent] = field(default_factory=list[SpanEvent])
    error: str = ""
    """The `error.type` of a span that failed, or ""."""
    after: str = ""
    """The span_id of the run whose failure, or worker's drain, made this one necessary, or ""."""


def request_spans(
    request_id: str, record: Mapping[bytes, bytes], end: EndEntry | None, *, model: str, cell: str, now_ms: int = 0
) -> list[Span]:
    """Returns the span of the request, then `queue` and `run` in turns.

    A run is followed by `prefill` if it began before the request's first token, and by `decode` if it made that token.
    Later runs have neither. `record` is a whole one (`records.ended`), `end` the last entry of its log.
    While the request has not ended, `end` is None and open spans end at `now_ms` (Unix milliseconds). No span has
    prompts or texts. Raises WireError for a body that cannot be read.
    """
    body = RequestBody.decode(record[b"body"])
    identity = TraceIdentity.of(request_id, body.traceparent)
    events = timeline(record)
    if end is None:
        events.append({"event": "end", "at_ms": now_ms})
    attempts = _Attempts(request_id, 1000 * events[0]["at_ms"])
    for event in events:
        attempts.next(event)
    error = "" if end is None or end.reason not in _FAILED else str(end.meta.get("code") or end.reason)
    whole = Span(
        name=f"{_operation(body)} {model}",
        span_id=attempts.root,
        parent_id=identity.parent_id,
        start_us=1000 * events[0]["at_ms"],
        end_us=attempts.now,
        server=True,
        attributes=_attributes(request_id, body, record, end, model=model, cell=cell)
        | {"blockrelay.runs": attempts.runs}
        | attempts.first_token(),
        error=error,
    )
    if attempts.last_run is not None and end is not None:
        attempts.last_run.attributes |= _of_last_run(end)
    return [whole, *attempts.spans]


class _Attempts:
    """Makes the spans of all runs from a timeline, event by event.

    The oldest events of a long timeline may be missing, and clocks may be put back, so a span begins at the latest time
    seen so far.
    """

    def __init__(self, request_id: str, accepted_us: int) -> None:
        self._request, self.root = request_id, span_id(request_id, "request")
        self.spans: list[Span] = []
        self.now = self._accepted = accepted_us
        self.runs = self._waits = 0
        self.last_run: Span | None = None
        self._waiting: Span | None = None
        self._run: Span | None = None
        self._step: Span | None = None
        self._first_token: int | None = None

    def first_token(self) -> dict[str, Value]:
        """The attribute with the seconds to the first token; empty without one."""
        if self._first_token is None:
            return {}
        return {"gen_ai.response.time_to_first_chunk": (self._first_token - self._accepted) / 1e6}

    def next(self, event: Mapping[str, Any]) -> None:
        """Applies the next event of the timeline."""
        self.now = max(self.now, 1000 * event["at_ms"])
        match event["event"]:
            case "queued":
                self._wait()
            case "claimed":
                self._close_run()
                self._begin_run(event.get("route_class", ""))
            case "first_token" if self._first_token is None:
                self._first_token = self.now
                self._close_step()
                if self._run is not None:
                    self._step = self._open("decode", self.runs, self._run.span_id)
            case "rerun":
                run = self._close_run(event["reason"])
                self._wait(after=run.span_id if run is not None else "")
            case "end":
                self._close_run()
                self._close_wait()
            case name:
                if self._run is not None and name != "accepted":
                    more = {f"blockrelay.{key}": value for key, value in event.items() if key not in ("event", "at_ms")}
                    self._run.events.append(SpanEvent(name=name, at_us=self.now, attributes=more))

    def _open(self, name: str, number: int, parent: str) -> Span:
        span = Span(
            name=name,
            span_id=span_id(self._request, name, number),
            parent_id=parent,
            start_us=self.now,
            end_us=self.now,
        )
        self.spans.append(span)
        return span

    def _wait(self, *, after: str = "") -> None:
        self._waits += 1
        self._waiting = self._open("queue", self._waits, self.root)
        self._waiting.after = after

    def _close_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.end_us = self.now
            self._waiting = None

    def _begin_run(self, route_class: str) -> None:
        after = self._waiting.after if self._waiting is not None else ""
        self._close_wait()
        self.runs += 1
        self._run = self.last_run = self._open("run", self.runs, self.root)
        self._run.after = after
        if route_class:
            self._run.attributes["blockrelay.route_class"] = route_class
        if self._first_token is None:
            self._step = self._open("prefill", self.runs, self._run.span_id)

    def _close_step(self) -> None:
        if self._step is not None:
            self._step.end_us = self.now
            self._step = None

    def _close_run(self, reason: str = "") -> Span | None:
        """Ends the open run and returns its span; None if no run is open. `reason` is that of the next run."""
        run, self._run = self._run, None
        self._close_step()
        if run is not None:
            run.end_us = self.now
            if reason:
                run.attributes["blockrelay.rerun.reason"] = reason
            run.error = "" if reason in _PLANNED else reason
        return run


def _attributes(
    request_id: str, body: RequestBody, record: Mapping[bytes, bytes], end: EndEntry | None, *, model: str, cell: str
) -> dict[str, Value]:
    """The attributes of the span of the whole request."""
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": _operation(body),
        "gen_ai.provider.name": "blockrelay",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request_id,
        "gen_ai.usage.input_tokens": int(body.prompt.size),
        "gen_ai.usage.output_tokens": int(record[b"committed"]),
        "blockrelay.cell": cell,
        "blockrelay.background": body.background,
    }
    params = {"gen_ai.request.max_tokens": "max_tokens", "gen_ai.request.seed": "seed"}
    params |= {f"gen_ai.request.{name}": name for name in ("temperature", "top_p", "top_k")}
    attributes |= {name: body.params[param] for name, param in params.items() if body.params.get(param) is not None}
    if body.session:
        attributes |= {"gen_ai.conversation.id": body.session, "blockrelay.step": body.step}
    if record.get(b"tenant"):
        attributes["blockrelay.tenant"] = record[b"tenant"].decode()
    if end is None:
        return attributes
    attributes["gen_ai.response.finish_reasons"] = [end.reason]
    if end.numerics:
        attributes["blockrelay.numerics_id"] = end.numerics
    if "cached_tokens" in end.meta:
        attributes["gen_ai.usage.cache_read.input_tokens"] = int(end.meta["cached_tokens"])
    return attributes


def _of_last_run(end: EndEntry) -> dict[str, Value]:
    """The attributes of the last run that only the terminal entry has: route and GPU blocks."""
    values = {"blockrelay.route": end.meta.get("route"), "blockrelay.gpu_blocks": end.meta.get("gpu_blocks")}
    return {name: [str(one) for one in value] for name, value in values.items() if value}


def _operation(body: RequestBody) -> str:
    return "text_completion" if body.logits == "none" else "tensor_step"


def span_id(request_id: str, name: str, number: int = 0) -> str:
    """The id of a span, 16 hex digits, which derives from request id, name and number."""
    return _digits(f"{request_id}/{name}/{number}", 16)


def _digits(name: str, length: int) -> str:
    """A hash of `name` with `length` hex digits; the last is 1, because an id of zeros is not valid."""
    return hashlib.sha256(name.encode()).hexdigest()[: length - 1] + "1"
