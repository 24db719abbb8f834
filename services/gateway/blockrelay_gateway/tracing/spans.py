"""The spans of a request, as a function of its record: whoever derives them when it has ended gets the same ones.

The record outlives every process, so a trace shows the run of a worker that was killed, which could never have told of
it. Times are of Redis' clock: those of the timeline (`blockrelay.protocol.timeline`) are whole milliseconds.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blockrelay.observability.traceparent import trace_and_parent
from blockrelay.protocol.messages import EndEntry, RequestBody
from blockrelay.protocol.timeline import timeline

Value = str | int | float | bool | list[str]

#: Version of OpenTelemetry's semantic conventions that has the names `gen_ai.*` and `error.type` as they are used here.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"
#: Ends of requests that trace servers shall show as errors. One that was cancelled is what its client wanted.
_FAILED = ("error", "expired")
#: The only end of a run, before that of its request, that nothing went wrong for.
_PLANNED = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceIdentity:
    """Where the spans of a request belong: `trace_id` of 32, `parent_id` of 16 hex digits, or "" where its client named
    no span. `traceparent` is the client's header, or "": it says too whether the client's trace is sampled."""

    trace_id: str
    parent_id: str
    traceparent: str

    @classmethod
    def of(cls, request: str, traceparent: str) -> "TraceIdentity":
        """Of the client's trace; without one, a trace of its own that follows from the id."""
        trace_id, parent_id = trace_and_parent(traceparent)
        if not trace_id:
            return cls(trace_id=_digits(request, 32), parent_id="", traceparent="")
        return cls(trace_id=trace_id, parent_id=parent_id, traceparent=traceparent)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """Something that happened at one moment of a span."""

    name: str
    at_us: int
    attributes: dict[str, Value]


@dataclass(slots=True, kw_only=True)
class Span:
    """Times are Unix microseconds. `span_id` and `parent_id` have 16 hex digits; `error` is the `error.type` of a span
    that failed, or ""; `after` is the span_id of the run whose failure made this one necessary, or ""."""

    name: str
    span_id: str
    parent_id: str
    start_us: int
    end_us: int
    server: bool = False
    attributes: dict[str, Value] = field(default_factory=dict[str, Value])
    events: list[SpanEvent] = field(default_factory=list[SpanEvent])
    error: str = ""
    after: str = ""


def request_spans(
    request: str, record: Mapping[bytes, bytes], end: EndEntry | None, *, model: str, cell: str, now_ms: int = 0
) -> list[Span]:
    """The span of the request first, then `queue` and `run` in turns, a run's `prefill` and `decode` behind it.

    `record`: a whole one (`blockrelay.protocol.ended`); `end`: the last entry of its log, None while it has not ended:
    then what is open ends at `now_ms`. Prompts and texts are in none of them. Raises WireError for a body that cannot
    be read.
    """
    body = RequestBody.decode(record[b"body"])
    identity = TraceIdentity.of(request, body.traceparent)
    events = timeline(record)
    if end is None:
        events.append({"event": "end", "at_ms": now_ms})
    attempts = _Attempts(request, 1000 * events[0]["at_ms"])
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
        attributes=_attributes(request, body, record, end, model=model, cell=cell)
        | {"blockrelay.runs": attempts.runs}
        | attempts.first_token(),
        error=error,
    )
    if attempts.last_run is not None and end is not None:
        attempts.last_run.attributes |= _of_last_run(end)
    return [whole, *attempts.spans]


class _Attempts:
    """Reads a timeline event by event. The oldest notes of a long one may be missing, and clocks may be put back: a
    span begins at the latest time seen so far."""

    def __init__(self, request: str, accepted_us: int) -> None:
        self._request, self.root = request, span_id(request, "request")
        self.spans: list[Span] = []
        self.now = self._accepted = accepted_us
        self.runs = self._waits = 0
        self.last_run: Span | None = None
        self._waiting: Span | None = None
        self._run: Span | None = None
        self._step: Span | None = None
        self._first_token: int | None = None

    def first_token(self) -> dict[str, Value]:
        """The seconds that it took, in the words of the conventions."""
        if self._first_token is None:
            return {}
        return {"gen_ai.response.time_to_first_chunk": (self._first_token - self._accepted) / 1e6}

    def next(self, event: Mapping[str, Any]) -> None:
        """The next event of the timeline."""
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
                    told = {f"blockrelay.{key}": value for key, value in event.items() if key not in ("event", "at_ms")}
                    self._run.events.append(SpanEvent(name=name, at_us=self.now, attributes=told))

    def _open(self, name: str, number: int, parent: str) -> Span:
        made = Span(
            name=name,
            span_id=span_id(self._request, name, number),
            parent_id=parent,
            start_us=self.now,
            end_us=self.now,
        )
        self.spans.append(made)
        return made

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
        """The run that ends here, `reason` being that of the next one; None when there is none."""
        run, self._run = self._run, None
        self._close_step()
        if run is not None:
            run.end_us = self.now
            if reason:
                run.attributes["blockrelay.rerun.reason"] = reason
            run.error = "" if reason == _PLANNED else reason
        return run


def _attributes(
    request: str, body: RequestBody, record: Mapping[bytes, bytes], end: EndEntry | None, *, model: str, cell: str
) -> dict[str, Value]:
    """Of the whole request."""
    said: dict[str, Value] = {
        "gen_ai.operation.name": _operation(body),
        "gen_ai.provider.name": "blockrelay",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request,
        "gen_ai.usage.input_tokens": int(body.prompt.size),
        "gen_ai.usage.output_tokens": int(record[b"committed"]),
        "blockrelay.cell": cell,
        "blockrelay.background": body.background,
    }
    asked = {"gen_ai.request.max_tokens": "max_tokens", "gen_ai.request.seed": "seed"}
    asked |= {f"gen_ai.request.{name}": name for name in ("temperature", "top_p", "top_k")}
    said |= {name: body.params[param] for name, param in asked.items() if body.params.get(param) is not None}
    if body.session:
        said |= {"gen_ai.conversation.id": body.session, "blockrelay.step": body.step}
    if record.get(b"tenant"):
        said["blockrelay.tenant"] = record[b"tenant"].decode()
    if end is None:
        return said
    said["gen_ai.response.finish_reasons"] = [end.reason]
    if end.numerics:
        said["blockrelay.numerics_id"] = end.numerics
    if "cached_tokens" in end.meta:
        said["gen_ai.usage.cache_read.input_tokens"] = int(end.meta["cached_tokens"])
    return said


def _of_last_run(end: EndEntry) -> dict[str, Value]:
    """What the terminal entry knows of the run that brought it."""
    told = {"blockrelay.route": end.meta.get("route"), "blockrelay.gpu_blocks": end.meta.get("gpu_blocks")}
    return {name: [str(one) for one in value] for name, value in told.items() if value}


def _operation(body: RequestBody) -> str:
    return "text_completion" if body.logits == "none" else "tensor_step"


def span_id(request: str, name: str, number: int = 0) -> str:
    """The same for everybody who names the same span."""
    return _digits(f"{request}/{name}/{number}", 16)


def _digits(name: str, length: int) -> str:
    """So many hex digits, never all of them zero: such an id is none."""
    return hashlib.sha256(name.encode()).hexdigest()[: length - 1] + "1"
