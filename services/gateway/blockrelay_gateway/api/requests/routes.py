"""The routes below /v1/requests/{id}: state, trace, cancellation and events of every request of this gateway's cells.

It does not matter which gateway accepted the request. Another tenant's request, and another model's, is not found.

The id may be the request's own (`req-…`) or the one that OpenAI's clients got (`cmpl-…`, `chatcmpl-…`); for events, its
prefix decides the format.
"""

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import Response

from blockrelay.errors import NotFound
from blockrelay.protocol.encoding.request_ids import RequestId, parse_id, public_id, sibling
from blockrelay.protocol.messages import EndEntry, RequestBody
from blockrelay.protocol.records.ended import Log, body_of, decode_log, whole_record
from blockrelay.protocol.records.provenance import provenance
from blockrelay.protocol.records.timeline import timeline, waits_for
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.transitions import calls
from blockrelay_gateway.api import state
from blockrelay_gateway.api.answers.requests import Provenance, RequestView, Trace
from blockrelay_gateway.api.infer.responses import InferFormat
from blockrelay_gateway.api.openai.answer_parts import message_of
from blockrelay_gateway.api.openai.responses import ChatFormat, CompletionFormat, ResponseOptions
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.http import authentication, openapi, sse
from blockrelay_gateway.http.errors import JsonAnswer, error_body
from blockrelay_gateway.policy import STEPS_SETTLE_S
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.deltas import CollectedAnswer, Relay, failure, finish_reason, status_of_record
from blockrelay_gateway.streaming.event_ids import HEADER, check_choices, parse_event_id
from blockrelay_gateway.streaming.readers import Readers
from blockrelay_gateway.streaming.responses import ResponseFormat, stream
from blockrelay_gateway.tracing.perfetto import trace_events
from blockrelay_gateway.tracing.spans import request_spans
from blockrelay_gateway.tracing.stages import stages_of
from blockrelay_gateway.tracing.stored_steps import stored_steps

router = APIRouter(responses=openapi.ERRORS)
#: The text of /openapi.json for the trace of a request.
TRACE_DESCRIPTION = """\
Where the time of a request went that was sent with `trace: true`, also while it runs: in the trace event format,
which ui.perfetto.dev and chrome://tracing open. 404 too where its stages have told nothing, or it is gone."""
PathId = Annotated[str, Path(description="`id` of an answer (cmpl-…, chatcmpl-…), or X-Request-Id (req-…)")]


def find(gateway: Gateway, text: str) -> tuple[RequestId, Cell]:
    """The parsed request id that a client sent, and its cell.

    Raises NotFound for a text that cannot be an id, and for a cell that this gateway does not serve.
    """
    request_id = parse_id(text)
    if request_id is None:
        raise NotFound(f"{text!r} is not a request id", param="id")
    return request_id, gateway.cells.of_id(request_id)


async def _read(
    gateway: Gateway, request_id: str, tenant: str, *, whole: bool = False
) -> tuple[str, Cell, Mapping[bytes, bytes], Log]:
    """Returns the id of a request in its cell, the cell, and its record and log; of the log the end, unless `whole`.

    Raises NotFound, also for the request of another tenant.
    """
    (name, _, _), cell = find(gateway, request_id)
    record, log = await cell.records.read(name, whole=whole)
    cell.records.check(request_id, (record.get(b"model"), record.get(b"tenant")), tenant)
    return name, cell, record, log


@router.get("/v1/requests/{request_id}", responses=openapi.answer(RequestView))
async def show(request_id: PathId, request: Request) -> Response:
    """State, text so far, usage and what happened when."""
    return JsonAnswer(await _view(state.of(request), request_id, authentication.of(request).name))


@router.get("/v1/requests/{request_id}/trace", description=TRACE_DESCRIPTION, responses=openapi.answer(Trace))
async def trace(request_id: PathId, request: Request) -> Response:
    """The spans and steps of a request that was sent with `trace: true`, in the trace event format.

    Raises NotFound for other requests, and if the steps that its stages recorded are gone or were never written.
    """
    name, cell, record, log = await _read(state.of(request), request_id, authentication.of(request).name)
    if not body_of(record, log).traced:
        raise NotFound(f"request {request_id} was not sent with trace: true", param="id")
    entries, now_ms = decode_log(log), cell.state.now_ms()
    end = entries[-1] if entries and isinstance(entries[-1], EndEntry) else None
    if end is not None:
        ended_s = (now_ms - int(record[b"progress_ms"])) / 1000
        await asyncio.sleep(min(STEPS_SETTLE_S, STEPS_SETTLE_S - ended_s))
    steps = await stored_steps(cell.links.payload, cell.links.keys, name)

    def events() -> dict[str, Any]:
        known = whole_record(record, log)
        spans = request_spans(name, known, end, model=cell.served.name, cell=cell.name, now_ms=now_ms)
        if end is not None and not steps and any(span.name == "run" for span in spans):
            message = f"the steps of request {request_id} that stages recorded are gone, or were never written"
            raise NotFound(message, param="id")
        return trace_events(public_id(name, cell.name), spans, stages_of(name, spans, steps, record))

    return JsonAnswer(await asyncio.to_thread(events))


@router.get("/v1/requests/{request_id}/provenance", responses=openapi.answer(Provenance))
async def ran(request_id: PathId, request: Request) -> Response:
    """Which workers computed which tokens: for each run the stages with worker, device, epoch and numerics id."""
    name, cell, record, log = await _read(state.of(request), request_id, authentication.of(request).name)
    tokens = int(record[b"committed"])
    return JsonAnswer(
        {
            "id": request_id,
            "object": "request.provenance",
            "request_id": public_id(name, cell.name),
            "completion_tokens": tokens,
            "runs": [asdict(run) for run in provenance(whole_record(record, log), tokens)],
        }
    )


@router.delete("/v1/requests/{request_id}", responses=openapi.answer(RequestView))
@router.post("/v1/requests/{request_id}/cancel", responses=openapi.answer(RequestView))
async def cancel(request_id: PathId, request: Request) -> Response:
    """End the request now, unless it has ended; of several choices, all. The answer is that of GET.

    With BLOCKRELAY_ACCEPT_REPLICAS it is 503 while too few replicas of Redis have that end; ask again then.
    """
    gateway, tenant = state.of(request), authentication.of(request).name
    replicas, meta = gateway.settings.accept_replicas, {"error": "by request of a client"}
    name, cell, record, log = await _read(gateway, request_id, tenant)
    for index in range(body_of(record, log).choices):
        call = calls.finish(sibling(name, index), "cancelled", meta=meta, confirm=replicas > 0)
        await cell.links.scripts.run(call, replicas=replicas)
    return JsonAnswer(await _view(gateway, request_id, tenant))


@router.get("/v1/requests/{request_id}/events", responses=openapi.events())
async def events(
    request_id: PathId,
    request: Request,
    starting_after: Annotated[str | None, Query(description="position, or event id")] = None,
    include_usage: Annotated[bool, Query(description="as in `stream_options`")] = False,
    continuous_usage_stats: Annotated[bool, Query(description="as in `stream_options`")] = False,
    return_token_ids: Annotated[bool, Query(description="as in a request")] = False,
    last_event_id: Annotated[str | None, Header(description="id of the last event that was read")] = None,
) -> Response:
    """The stream of the request, or what of it is behind an event: the rest of an interrupted stream. Events have the
    form of the id: OpenAI's for `cmpl-...` and `chatcmpl-...`, that of `/v1/infer` for `req-...`."""
    gateway = state.of(request)
    (name, _, prefix), cell = find(gateway, request_id)
    form: ResponseFormat
    if prefix == "req":
        form = InferFormat()
    else:
        options = ResponseOptions(
            include_usage=include_usage,
            continuous_usage=continuous_usage_stats,
            return_token_ids=return_token_ids or gateway.served.tokenizer is None,
        )
        form_of = CompletionFormat if prefix == CompletionFormat.prefix else ChatFormat
        form = form_of(gateway.served.name, gateway.served.tokenizer, options)
    tenant = authentication.of(request).name
    # A browser that comes back sends the header beside the URL with which it began.
    param, text = ("starting_after", starting_after) if last_event_id is None else (HEADER, last_event_id)
    after = None if text is None else parse_event_id(text, name, param=param)
    readers = await _follow(cell, name, tenant, after, param=param)
    return sse.EventStream(stream(cell, readers, form, after=after), readers, readers.headers)


async def _follow(cell: Cell, name: str, tenant: str, after: tuple[int, ...] | None, *, param: str) -> Readers:
    """A reader of all choices of a request; every choice is checked before the first is followed.

    Raises NotFound, or BadRequest if `after` has not one position for each choice; then this gateway follows nothing.
    """
    choices = (await _look(cell, name, tenant)).choices
    check_choices(after, choices, param=param)
    names = [sibling(name, index) for index in range(choices)]
    for other in names[1:]:
        await _look(cell, other, tenant)
    requests: list[ActiveRequest] = []
    with ExitStack() as held:  # each has a reader at once, so that it is left again when a later one fails
        for one in names:
            requests.append(await cell.resumption.resume(one, tenant))
            held.enter_context(Readers(cell.registry, requests[-1:]))
        return Readers(cell.registry, requests)


async def _look(cell: Cell, name: str, tenant: str) -> RequestBody:
    """The body of a request, read without following it. Raises NotFound."""
    if active := cell.registry.get(name):
        cell.records.check_active(name, active, tenant)
        return active.body
    record, log = await cell.records.read(name, whole=False)
    cell.records.check(name, (record.get(b"model"), record.get(b"tenant")), tenant)
    return body_of(record, log)


async def _view(gateway: Gateway, request_id: str, tenant: str) -> dict[str, Any]:
    """The answer of GET /v1/requests/{id}, from the request's record and token log. Raises NotFound."""
    name, cell, record, log = await _read(gateway, request_id, tenant, whole=True)
    body = body_of(record, log)
    params = SamplingParams.from_dict(body.params)
    relay, answer = (
        Relay(gateway.served.tokenizer, params, gateway.served.folder.model.eos_ids, body.prompt, body.shown),
        CollectedAnswer(),
    )
    for entry in decode_log(log):
        answer.add(relay.push(entry))
    end = answer.end
    error = failure(end) if end else None
    new = len(answer.tokens)
    message, calls = message_of(answer.text, body.calls, body.reasoning, name)
    return {
        "id": request_id,
        "object": "request",
        "request_id": public_id(name, cell.name),
        "choices": [public_id(sibling(name, index), cell.name) for index in range(body.choices)],
        "status": status_of_record(record[b"state"].decode(), end.reason if end else ""),
        "created": int(record[b"accepted_ms"]) // 1000,
        "model": gateway.served.name,
        "background": body.background,
        "text": answer.text,
        **{part: message[part] for part in ("reasoning_content", "tool_calls") if part in message},
        "token_ids": answer.token_ids,
        "finish_reason": finish_reason(end, calls=calls) if end else None,
        "usage": {
            "prompt_tokens": body.prompt.size,
            "completion_tokens": new,
            "total_tokens": body.prompt.size + new,
        },
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "system_fingerprint": (end.numerics if end else record.get(b"numerics", b"").decode()) or None,
        "waits_for_numerics_id": waits_for(record),
        "timeline": timeline(whole_record(record, log)),
        "reruns": int(record.get(b"reruns", b"0")),
        "fallback_events": [event.to_json() for event in end.fallbacks] if end else [],
        "error": error_body(error)["error"] if error else None,
    }
