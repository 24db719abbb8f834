"""The routes POST /v1/infer, its WebSocket, and GET /v1/sessions/{id}."""

from contextlib import ExitStack

from fastapi import APIRouter, Request, WebSocket
from fastapi.responses import Response

from blockrelay_gateway.api import state
from blockrelay_gateway.api.answers.infer import InferError, QueuedInfer, SessionView, TensorResult, TextResult
from blockrelay_gateway.api.body_route import OwnBodyRoute, described_by
from blockrelay_gateway.api.infer import handlers, session_view
from blockrelay_gateway.api.infer.responses import InferFormat, TensorAnswer
from blockrelay_gateway.api.infer.schemas import InferRequest
from blockrelay_gateway.api.infer.websocket import converse
from blockrelay_gateway.api.intake import accepted
from blockrelay_gateway.api.reading import BodyReader, Tensors
from blockrelay_gateway.api.submitting import submit
from blockrelay_gateway.http import authentication, openapi, sse
from blockrelay_gateway.http.errors import JsonAnswer, status_of
from blockrelay_gateway.streaming.event_ids import HEADER as LAST_EVENT_ID
from blockrelay_gateway.streaming.event_ids import starting_after
from blockrelay_gateway.streaming.responses import stream

router = APIRouter(route_class=OwnBodyRoute)


@router.post(
    "/v1/infer",
    dependencies=[described_by(InferRequest)],
    responses=openapi.errors(InferError) | openapi.work(TensorResult | TextResult, QueuedInfer),
)
async def infer_once(request: Request) -> Response:
    """The tensor form or the text form."""
    gateway, tenant = state.of(request), authentication.of(request)
    body = await gateway.intake.body(request, BodyReader.infer)
    if isinstance(body, Tensors):
        session = body.request.session_id
        step = await handlers.submit_tensors(gateway, body, tenant)
        del body
        accepted(request)
        with step.readers, ExitStack() as room:  # given back also if the client left before anything was read
            room.callback(step.share.give_back)
            done = await sse.unless_gone(request, handlers.finish_tensors(step, session, tenant))
            if done is not None and done.tensors:
                answer, within_s = TensorAnswer(done.body, done.tensors), gateway.settings.arrival_timeout_s
                return sse.LargeAnswer(answer.pieces(), answer.size, room.pop_all(), step.readers.headers, within_s)
        return _answer(done, step.readers.headers)
    names = [one.request_id for one in body.requests]
    after = starting_after(request.headers.get(LAST_EVENT_ID), names, streamed=body.stream)
    submitted = await submit(request, body.requests)
    if submitted is None:
        return _answer(None, {})
    cell, readers = submitted
    if body.stream:
        return sse.EventStream(stream(cell, readers, InferFormat(), after=after), readers, readers.headers)
    with readers:
        if body.background:
            return JsonAnswer(await handlers.background(cell, readers), status_code=202, headers=readers.headers)
        return _answer(await sse.unless_gone(request, handlers.finish_text(cell, readers)), readers.headers)


def _answer(done: handlers.Finished | None, headers: dict[str, str]) -> Response:
    if done is None:
        return Response(status_code=499)
    return JsonAnswer(done.body, status_code=status_of(done.error) if done.error else 200, headers=headers)


@router.get("/v1/sessions/{session_id}", responses=openapi.ERRORS | openapi.answer(SessionView))
async def session(session_id: str, request: Request) -> Response:
    """A session of tensor steps: its step and tokens, and the pages that it has filled on each stage."""
    return JsonAnswer(await session_view.view(state.of(request), authentication.of(request), session_id))


@router.websocket("/v1/infer/ws")
@router.websocket("/ws")
@router.websocket("/")  # for clients that know a host and a port only
async def infer_socket(socket: WebSocket) -> None:
    """Serves a WebSocket whose messages are bodies of POST /v1/infer; answers have the message's `id`."""
    await converse(state.of(socket), socket)
