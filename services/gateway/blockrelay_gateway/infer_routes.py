"""POST /v1/infer and its WebSocket."""

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import Response
from pydantic import ValidationError
from redis.exceptions import RedisError

from blockrelay.errors import BadRequest, BlockrelayError, ServiceUnavailable
from blockrelay_gateway import gateway as gateways
from blockrelay_gateway import infer, sse, tenants
from blockrelay_gateway.answers import stream
from blockrelay_gateway.event_ids import starting_after
from blockrelay_gateway.gateway import Gateway
from blockrelay_gateway.http_errors import JsonAnswer, from_validation, infer_error, status_of, to_json
from blockrelay_gateway.identity import HEADER
from blockrelay_gateway.infer_format import InferStream
from blockrelay_gateway.offload import body_size, by_size
from blockrelay_gateway.schemas import InferRequest
from blockrelay_gateway.translate import clean_traceparent

router = APIRouter()
#: Messages of one socket that are under way at once; more wait.
SOCKET_REQUESTS = 64


@router.post("/v1/infer")
async def infer_once(body: InferRequest, request: Request) -> Response:
    """The tensor form or the text form."""
    gateway = gateways.of(request)
    request.state.session_id = body.session_id  # errors name it
    trace = clean_traceparent(request.headers.get("traceparent"))
    if body.id is not None:
        raise BadRequest("id is for messages on the WebSocket", param="id")
    if body.idempotency_key is not None:
        raise BadRequest(f"idempotency_key is for messages on the WebSocket: send the header {HEADER}", param=HEADER)
    tenant = tenants.of(request)
    keys = request.headers.getlist(HEADER)
    who = await by_size(body_size(request), gateway.identify, keys, body, tenant, "infer")
    if infer.is_tensor_form(body):
        size = body_size(request)
        steps, orders, readers = await infer.submit_tensors(gateway, body, who, trace, tenant, size=size)
        with readers:  # also of a client that left before anything was read
            done = await sse.unless_gone(request, infer.finish_tensors(gateway, body, tenant, steps, orders, readers))
        return _answer(done, readers.headers)
    order = await infer.text_order(gateway, body, who, trace)
    after = starting_after(request, [order], streamed=bool(body.stream))
    readers = await gateway.admission.submit([order], tenant)
    name = order.request
    if body.stream:
        return sse.EventStream(stream(gateway, readers, InferStream(), after=after), readers, request_id=name)
    headers = {"x-request-id": name, **readers.headers}
    with readers:
        if body.background:
            return JsonAnswer(await infer.background(gateway, readers), status_code=202, headers=headers)
        return _answer(await sse.unless_gone(request, infer.finish_text(gateway, readers)), headers)


def _answer(done: tuple[dict[str, Any], BlockrelayError | None] | None, headers: dict[str, str]) -> Response:
    if done is None:
        return Response(status_code=499)
    body, error = done
    return JsonAnswer(body, status_code=status_of(error) if error else 200, headers=headers)


@router.websocket("/v1/infer/ws")
@router.websocket("/ws")
async def infer_socket(socket: WebSocket) -> None:
    """Every message is a body of POST /v1/infer, several at once; answers carry the message's `id`."""
    await socket.accept()
    conversation = Conversation(gateways.of(socket), socket)
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                while True:
                    text = await socket.receive_text()
                    await conversation.room.acquire()
                    tasks.create_task(conversation.message(text)).add_done_callback(
                        lambda _: conversation.room.release()
                    )
            except KeyError:
                await socket.close(code=1003, reason="send text messages, not binary ones")
                raise _Left from None
            except WebSocketDisconnect:
                raise _Left from None
    except* (_Left, WebSocketDisconnect):  # the latter from a task that was sending
        pass


class _Left(Exception):
    """The client has left: ends the task group, which releases all readers."""


class Conversation:
    """One socket. Messages are answered by tasks of their own; only sending is exclusive."""

    def __init__(self, gateway: Gateway, socket: WebSocket) -> None:
        self._gateway, self._socket = gateway, socket
        self._sending = asyncio.Lock()
        self._tenant = tenants.of(socket)
        self._trace = clean_traceparent(socket.headers.get("traceparent"))
        self.room = asyncio.Semaphore(SOCKET_REQUESTS)

    async def message(self, text: str) -> None:
        """Answer one message, whatever is in it."""
        name: str | int | None = None
        session: str | None = None
        try:
            try:
                content = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"the message is not JSON: {error}") from error
            if isinstance(content, dict):
                name, session = _plain(content, "id"), _plain(content, "session_id")  # pyright: ignore
            request = InferRequest.model_validate(content)
            await self._run(request, len(text))
        except ValidationError as error:
            await self._refuse(from_validation(error.errors()), name, session)
        except BlockrelayError as error:
            await self._refuse(error, name, session)
        except RedisError:
            await self._refuse(ServiceUnavailable("the queue (Redis) does not answer; try again later"), name, session)

    async def _run(self, request: InferRequest, size: int) -> None:
        keys = [] if request.idempotency_key is None else [request.idempotency_key]
        who = self._gateway.identify(keys, request, self._tenant, "infer")
        if infer.is_tensor_form(request):
            steps, orders, readers = await infer.submit_tensors(
                self._gateway, request, who, self._trace, self._tenant, size=size
            )
            body, _ = await infer.finish_tensors(self._gateway, request, self._tenant, steps, orders, readers)
            await self._send(body, request.id)
            return
        order = await infer.text_order(self._gateway, request, who, self._trace)
        with await self._gateway.admission.submit([order], self._tenant) as readers:
            if request.background:
                await self._send(await infer.background(self._gateway, readers), request.id)
            elif request.stream:
                async for body in infer.text_objects(self._gateway, readers):
                    await self._send(body, request.id)
            else:
                body, _ = await infer.finish_text(self._gateway, readers)
                await self._send(body, request.id)

    async def _refuse(self, error: BlockrelayError, name: str | int | None, session: str | None) -> None:
        self._gateway.refusals.count("/v1/infer/ws", error)
        await self._send(infer_error(error, session), name)

    async def _send(self, body: dict[str, Any], name: str | int | None) -> None:
        named = body if name is None else {"id": name, **body}
        async with self._sending:
            await self._socket.send_text(to_json(named).decode())


def _plain(content: dict[str, Any], name: str) -> Any:
    value = content.get(name)
    return value if isinstance(value, str | int) else None
