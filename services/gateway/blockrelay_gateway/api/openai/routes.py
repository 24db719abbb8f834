"""POST /v1/completions and /v1/chat/completions."""

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from blockrelay.observability import logs
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.idempotency import HEADER, Identity
from blockrelay_gateway.api import state
from blockrelay_gateway.api.client_headers import client_headers
from blockrelay_gateway.api.openai.responses import Kind, Options, accepted_headers, format_of
from blockrelay_gateway.api.openai.schemas import ChatRequest, CompletionRequest, StreamOptions
from blockrelay_gateway.api.openai.strictness import header, ignored_fields, label
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.http import authentication, openapi, sse
from blockrelay_gateway.http.errors import JsonAnswer, error_body, headers_of, status_of
from blockrelay_gateway.http.offload import body_size, by_size
from blockrelay_gateway.streaming.deltas import failure
from blockrelay_gateway.streaming.event_ids import HEADER as LAST_EVENT_ID
from blockrelay_gateway.streaming.event_ids import starting_after
from blockrelay_gateway.streaming.responses import collect, stream

router = APIRouter(responses=openapi.WORK)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or more prompts."""
    gateway = state.of(request)
    headers = client_headers(request.headers)
    ignored = ignored_fields(body, strict=headers.strict)
    who = await _identity(gateway, request, body, "completion")
    asked = await by_size(body_size(request), gateway.openai.completion, body, headers, who)
    return await _answer(gateway, request, body, asked, "completion", ignored)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Write the assistant's next message."""
    gateway = state.of(request)
    headers = client_headers(request.headers)
    ignored = ignored_fields(body, strict=headers.strict)
    who = await _identity(gateway, request, body, "chat")
    asked = await by_size(body_size(request), gateway.openai.chat, body, headers, who)
    return await _answer(gateway, request, body, [asked], "chat", ignored)


async def _identity(gateway: Gateway, request: Request, body: CompletionRequest | ChatRequest, kind: Kind) -> Identity:
    keys = request.headers.getlist(HEADER)
    return await by_size(body_size(request), gateway.identify, keys, body, authentication.of(request), kind)


async def _answer(
    gateway: Gateway,
    request: Request,
    body: CompletionRequest | ChatRequest,
    asked: list[AdmissionRequest],
    kind: Kind,
    ignored: Sequence[str],
) -> Response:
    asked_of_stream = body.stream_options or StreamOptions()
    options = Options(
        include_usage=bool(asked_of_stream.include_usage),
        continuous_usage=bool(asked_of_stream.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids) or gateway.served.tokenizer is None,
    )
    form = format_of(kind, gateway.model_name, gateway.served.tokenizer, options)
    after = starting_after(
        request.headers.get(LAST_EVENT_ID), [one.request for one in asked], streamed=bool(body.stream)
    )
    cell, readers = await gateway.submission.submit(asked, authentication.of(request))
    headers = {**readers.headers, **header(ignored)}
    if ignored:
        logs.get().info("FIELDS_IGNORED", request_id=asked[0].request, fields=list(ignored))
        for field in sorted({label(name) for name in ignored}):
            cell.metrics.ignored_fields.labels(field).inc()
    if body.stream:
        resumes = HEADER in request.headers or LAST_EVENT_ID in request.headers
        with_ids = resumes or bool(asked_of_stream.event_ids)
        headers |= accepted_headers(readers.requests)
        return sse.EventStream(stream(cell, readers, form, after=after, with_ids=with_ids), readers, headers)
    with readers:
        if body.background:
            accepted = form.background(readers.requests[0], await cell.status(readers))
            return JsonAnswer(accepted, status_code=202, headers=headers)
        collected = await sse.unless_gone(request, collect(cell, readers))
    if collected is None:
        return Response(status_code=499)
    for answer in collected:
        if answer.end is not None and (error := failure(answer.end)):
            return JsonAnswer(error_body(error), status_code=status_of(error), headers={**headers, **headers_of(error)})
    return JsonAnswer(form.whole(collected, readers.requests), headers=headers)
