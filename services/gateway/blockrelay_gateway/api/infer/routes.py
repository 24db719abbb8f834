"""POST /v1/infer and its WebSocket."""

from fastapi import APIRouter, Request, WebSocket
from fastapi.responses import Response, StreamingResponse

from blockrelay.errors import BadRequest
from blockrelay_gateway.admission.idempotency import HEADER
from blockrelay_gateway.api import state
from blockrelay_gateway.api.client_headers import client_headers
from blockrelay_gateway.api.infer import handlers, session_view
from blockrelay_gateway.api.infer.responses import InferFormat, TensorAnswer
from blockrelay_gateway.api.infer.schemas import InferRequest
from blockrelay_gateway.api.infer.websocket import converse
from blockrelay_gateway.http import authentication, openapi, sse
from blockrelay_gateway.http.errors import JsonAnswer, status_of
from blockrelay_gateway.http.offload import body_size, by_size
from blockrelay_gateway.streaming.event_ids import HEADER as LAST_EVENT_ID
from blockrelay_gateway.streaming.event_ids import starting_after
from blockrelay_gateway.streaming.responses import stream

router = APIRouter(responses=openapi.WORK)


@router.post("/v1/infer")
async def infer_once(body: InferRequest, request: Request) -> Response:
    """The tensor form or the text form."""
    gateway = state.of(request)
    request.state.session_id = body.session_id  # errors name it
    headers = client_headers(request.headers)
    if body.id is not None:
        raise BadRequest("id is for messages on the WebSocket", param="id")
    if body.idempotency_key is not None:
        raise BadRequest(f"idempotency_key is for messages on the WebSocket: send the header {HEADER}", param=HEADER)
    tenant = authentication.of(request)
    keys = request.headers.getlist(HEADER)
    who = await by_size(body_size(request), gateway.identify, keys, body, tenant, "infer")
    if handlers.is_tensor_form(body):
        size = body_size(request)
        accepted = await handlers.submit_tensors(gateway, body, who, headers, tenant, size=size)
        readers = accepted.readers
        with readers:  # also of a client that left before anything was read
            finish = handlers.finish_tensors(accepted, body.session_id, tenant)
            done = await sse.unless_gone(request, finish)
        return _answer(done, readers.headers)
    asked = await handlers.text_request(gateway, body, who, headers)
    after = starting_after(request.headers.get(LAST_EVENT_ID), [asked.request], streamed=bool(body.stream))
    cell, readers = await gateway.submission.submit([asked], tenant)
    if body.stream:
        return sse.EventStream(stream(cell, readers, InferFormat(), after=after), readers, readers.headers)
    with readers:
        if body.background:
            return JsonAnswer(await handlers.background(cell, readers), status_code=202, headers=readers.headers)
        return _answer(await sse.unless_gone(request, handlers.finish_text(cell, readers)), readers.headers)


def _answer(done: handlers.Finished | None, headers: dict[str, str]) -> Response:
    if done is None:
        return Response(status_code=499)
    if done.tensors:
        answer = TensorAnswer(done.body, done.tensors)
        headers = {**headers, "content-length": str(answer.size)}
        return StreamingResponse(answer.pieces(), headers=headers, media_type=JsonAnswer.media_type)
    return JsonAnswer(done.body, status_code=status_of(done.error) if done.error else 200, headers=headers)


@router.get("/v1/sessions/{session_id}", responses=openapi.ERRORS)
async def session(session_id: str, request: Request) -> Response:
    """A session of tensor steps: its step and tokens, and the pages that it has filled on each stage."""
    return JsonAnswer(await session_view.view(state.of(request), authentication.of(request), session_id))


@router.websocket("/v1/infer/ws")
@router.websocket("/ws")
@router.websocket("/")  # where clients go that know a host and a port only
async def infer_socket(socket: WebSocket) -> None:
    """Every message is a body of POST /v1/infer, several at once; answers carry the message's `id`."""
    await converse(state.of(socket), socket)
