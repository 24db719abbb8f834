"""POST /v1/completions and /v1/chat/completions."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from blockrelay.observability import logs
from blockrelay_gateway.admission.idempotency import HEADER
from blockrelay_gateway.api import state
from blockrelay_gateway.api.answers.openai import ChatCompletion, Completion, QueuedText
from blockrelay_gateway.api.body_route import OwnBodyRoute, described_by
from blockrelay_gateway.api.openai.prompt_answers import answer_bytes
from blockrelay_gateway.api.openai.responses import (
    ChatFormat,
    CompletionFormat,
    OpenAIFormat,
    ResponseOptions,
    accepted_headers,
)
from blockrelay_gateway.api.openai.schemas import ChatRequest, CompletionRequest, StreamOptions
from blockrelay_gateway.api.openai.strictness import header, label
from blockrelay_gateway.api.reading import BodyReader, Text
from blockrelay_gateway.api.submitting import submit
from blockrelay_gateway.helpers.offload import by_size
from blockrelay_gateway.http import openapi, sse
from blockrelay_gateway.http.body_budget import BodyShare
from blockrelay_gateway.http.errors import JsonAnswer, error_body, headers_of, status_of
from blockrelay_gateway.policy import ANSWER_ROOM_S
from blockrelay_gateway.streaming.deltas import failure
from blockrelay_gateway.streaming.event_ids import HEADER as LAST_EVENT_ID
from blockrelay_gateway.streaming.event_ids import starting_after
from blockrelay_gateway.streaming.responses import collect, stream

router = APIRouter(responses=openapi.ERRORS, route_class=OwnBodyRoute)


@router.post(
    "/v1/completions",
    dependencies=[described_by(CompletionRequest)],
    responses=openapi.work(Completion, QueuedText),
)
async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    body = await state.of(request).intake.body(request, BodyReader.completion)
    return await _answer(request, body, CompletionFormat)


@router.post(
    "/v1/chat/completions",
    dependencies=[described_by(ChatRequest)],
    responses=openapi.work(ChatCompletion, QueuedText),
)
async def chat_completions(request: Request) -> Response:
    """Write the assistant's next message."""
    body = await state.of(request).intake.body(request, BodyReader.chat)
    return await _answer(request, body, ChatFormat)


async def _answer(request: Request, body: Text, form_of: type[OpenAIFormat]) -> Response:
    """Submits the requests of `body` and answers: a stream, the id of a background request, or the whole answer."""
    gateway, requests, ignored = state.of(request), body.requests, body.ignored
    stream_options = body.stream_options or StreamOptions()
    options = ResponseOptions(
        include_usage=bool(stream_options.include_usage),
        continuous_usage=bool(stream_options.continuous_usage_stats),
        return_token_ids=body.return_token_ids or gateway.served.tokenizer is None,
        echo=body.echo,
        prompt_logprobs=body.prompt_logprobs,
    )
    form = form_of(gateway.served.name, gateway.served.tokenizer, options)
    after = starting_after(
        request.headers.get(LAST_EVENT_ID), [one.request_id for one in requests], streamed=body.stream
    )
    share = BodyShare(gateway.bodies)
    share.check(answer_bytes(requests))
    accepted = await submit(request, requests)
    if accepted is None:
        return Response(status_code=499)
    cell, readers = accepted
    headers = {**readers.headers, **header(ignored)}
    if ignored:
        logs.get().info("FIELDS_IGNORED", request_id=requests[0].request_id, fields=list(ignored))
        for field in sorted({label(name) for name in ignored}):
            cell.links.metrics.ignored_fields.labels(field).inc()
    if body.stream:
        resumes = HEADER in request.headers or LAST_EVENT_ID in request.headers
        with_ids = resumes or bool(stream_options.event_ids)
        headers |= accepted_headers(readers.requests)
        return sse.EventStream(stream(cell, readers, form, after=after, with_ids=with_ids), readers, headers)
    with readers:
        if body.background:
            queued = form.background(readers.requests[0], await cell.status(readers))
            return JsonAnswer(queued, status_code=202, headers=headers)
        collected = await sse.unless_gone(request, collect(cell, readers))
    if collected is None:
        return Response(status_code=499)
    for answer in collected:
        if answer.end is not None and (error := failure(answer.end)):
            return JsonAnswer(error_body(error), status_code=status_of(error), headers={**headers, **headers_of(error)})
    try:
        if size := answer_bytes(readers.requests):
            await share.wait(size, ANSWER_ROOM_S)
        return await by_size(size, lambda: JsonAnswer(form.whole(collected, readers.requests), headers=headers))
    finally:
        share.give_back()
