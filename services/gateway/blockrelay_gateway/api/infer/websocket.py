"""The WebSocket of /v1/infer: several messages of one connection are answered at once."""

import asyncio
import json
import re
from collections.abc import Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect
from starlette.types import Message

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import BlockrelayError, LimitExceeded, RedisTrouble, Unauthorized
from blockrelay_gateway import policy
from blockrelay_gateway.api.client_headers import client_headers
from blockrelay_gateway.api.infer import handlers
from blockrelay_gateway.api.infer.responses import TensorAnswer
from blockrelay_gateway.api.intake import BodyIntake, content_of
from blockrelay_gateway.api.reading import BodyReader, RequestOrigin, Tensors, Text
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.draining.drain import RESTART_CODE, RESTART_REASON
from blockrelay_gateway.http import authentication
from blockrelay_gateway.http.body_budget import BodyBudget, BodyShare, ReceivedBody
from blockrelay_gateway.http.body_limit import RECEIVED
from blockrelay_gateway.http.errors import infer_error, to_json
from blockrelay_gateway.http.server import PIECES
from blockrelay_gateway.policy import SOCKET_REQUESTS
from blockrelay_gateway.streaming.readers import Readers

_OPENING = re.compile(rb"\s*\{")
_NAME = re.compile(rb'\s*"(id|session_id)"\s*:\s*("[^"\\\\\x00-\x1f]{0,1000}"|-?[0-9]{1,18})\s*,')


async def converse(gateway: Gateway, socket: WebSocket) -> None:
    """Serves a socket until the client leaves or sends a binary message, its API key is removed, or the gateway ends.

    In the last two cases the messages that were taken are answered first. The handshake must be authenticated already;
    this function accepts it. Close codes: 1003 (binary message), 1008 (key), RESTART_CODE (the gateway ends).
    """
    time_to_leave = gateway.drain.time_to_leave()
    await socket.accept()
    conversation = SocketConversation(gateway, socket)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_watch_key(conversation, socket))
            tasks.create_task(_leave_when_it_is_time(conversation, socket, time_to_leave))
            try:
                while True:
                    message = SocketMessage(await received(socket), conversation.bodies)
                    if conversation.leaving:  # the close code tells clients to send again what has no answer
                        message.close()
                        continue
                    conversation.begin()
                    try:
                        await conversation.room.acquire()
                    except asyncio.CancelledError:
                        message.close()
                        raise
                    answering = tasks.create_task(conversation.answer(message))
                    answering.add_done_callback(partial(conversation.over, message))
            except KeyError:
                await socket.close(code=1003, reason="send text messages, not binary ones")
                raise _Left from None
            except WebSocketDisconnect:
                raise _Left from None
    except* (_Left, WebSocketDisconnect):  # the latter from a task that was sending
        pass


async def received(socket: WebSocket) -> Message:
    """Waits for the next message. Raises WebSocketDisconnect."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"], message.get("reason"))
    return message


async def _watch_key(conversation: "SocketConversation", socket: WebSocket) -> None:
    """Closes the socket when its API key is removed, once all messages that were taken are answered."""
    while True:
        await asyncio.sleep(policy.KEY_CHECK_S)
        try:
            authentication.current_tenant(socket)
        except Unauthorized as error:
            if conversation.under_way == 0:
                await socket.close(code=1008, reason=str(error))
                raise _Left from None


async def _leave_when_it_is_time(
    conversation: "SocketConversation", socket: WebSocket, time_to_leave: asyncio.Event
) -> None:
    """Closes the socket when the gateway ends: no more messages are taken, those that were taken are answered first."""
    await time_to_leave.wait()
    conversation.leaving = True
    await conversation.idle.wait()
    await socket.close(code=RESTART_CODE, reason=RESTART_REASON)
    raise _Left


class _Left(Exception):
    """The conversation is over: this error ends the task group, which releases all readers."""


class SocketMessage:
    """One message of a client. Its bytes count in the budget of bodies until its request is accepted or refused.

    Neither its text nor its parsed JSON is kept longer than that.
    """

    def __init__(self, received: Message, bodies: BodyBudget) -> None:
        """Takes the bytes of an ASGI message. Raises KeyError for a binary message."""
        self.name: str | int | None = None
        self.session: str | None = None
        self._refusal: LimitExceeded | None = None
        large: ReceivedBody | None = received.get(RECEIVED)
        if large is not None:
            self._raw, self._share = large.take(), large.share
            return
        self._raw, self._share = received["text"].encode(), BodyShare(bodies)
        try:
            self._share.take(len(self._raw))
        except LimitExceeded as error:
            self._refusal = error

    async def read(self, intake: BodyIntake, sender: RequestOrigin) -> Text | Tensors:
        """Reads the message, once. Afterwards `name` and `session` have the ids that its answer repeats.

        Raises LimitExceeded for a message without room in the budget, BadRequest for a wrong one, NotFound for another
        model, and RequestTooLarge for one that takes too much memory when parsed. For a large message it also raises
        ServiceUnavailable, if its helper process is late, keeps dying, or finds another model folder than at the start,
        and BlockFolderError if the helper cannot use the folder.
        """
        raw, self._raw = self._raw, b""
        self.name, self.session = names_at_start(raw)
        if self._refusal is not None:
            raise self._refusal
        read = await intake.read(raw, sender, self._share, BodyReader.message)
        self.name, self.session = read.name, read.session_id
        return content_of(read)

    def close(self) -> None:
        """Gives back the memory of a message that was accepted or refused. Idempotent."""
        self._share.give_back()


def names_at_start(raw: bytes) -> tuple[Any, Any]:
    """`id` and `session_id` of a message if they are its first fields, else None; for messages that are not parsed."""
    names: dict[str, Any] = {}
    place = _OPENING.match(raw)
    while place is not None and (field := _NAME.match(raw, place.end())) is not None:
        names[field[1].decode()], place = json.loads(field[2].decode("utf-8", "replace")), field
    return names.get("id"), names.get("session_id")


class SocketConversation:
    """The state of one socket. Each message is answered by a task of its own; only sending is exclusive."""

    def __init__(self, gateway: Gateway, socket: WebSocket) -> None:
        self._gateway, self._socket = gateway, socket
        self._sending = asyncio.Lock()
        self.under_way = 0  # messages that were taken and are not answered
        self.idle = asyncio.Event()  # set while there are none
        self.idle.set()
        self.leaving = False  # no message is taken any more
        self.room = asyncio.Semaphore(SOCKET_REQUESTS)
        self.bodies = gateway.bodies

    def begin(self) -> None:
        """Counts a message that was taken; `answer` has to follow."""
        self.under_way += 1
        self.idle.clear()

    async def answer(self, message: SocketMessage) -> None:
        """Answers one message, after `begin` and `room.acquire`; a refused message gets the error as its answer.

        Raises WebSocketDisconnect if the client leaves meanwhile.
        """
        try:
            finish = await self._begin(message)
            message.close()
            await finish
        except BlockrelayError as error:
            if isinstance(error, RedisTrouble):
                self._gateway.cells.count_error(error)
            await self._refuse(error, message)
        finally:
            message.close()
            self.under_way -= 1
            if not self.under_way:
                self.idle.set()

    def over(self, message: SocketMessage, _: asyncio.Task[None]) -> None:
        """Releases a message and its place in `room`: it was answered, or its client left.

        `answer` may not have had its first turn then.
        """
        message.close()
        self.room.release()

    async def _begin(self, message: SocketMessage) -> Coroutine[Any, Any, None]:
        """Has the request of a message accepted; the coroutine that it returns sends the answer without the message."""
        gateway = self._gateway
        sender = RequestOrigin(authentication.of(self._socket).name, client_headers(self._socket.headers))
        body = await message.read(gateway.intake, sender)
        tenant = authentication.current_tenant(self._socket)  # the same tenant, with its current limits
        if isinstance(body, Tensors):
            session = body.request.session_id
            return self._tensors(message.name, session, await handlers.submit_tensors(gateway, body, tenant), tenant)
        cell, readers = await gateway.submission.submit(body.requests, tenant)
        return self._text(message.name, cell, readers, background=body.background, streamed=body.stream)

    async def _tensors(
        self, name: str | int | None, session: str | None, accepted: handlers.AcceptedStep, tenant: Tenant
    ) -> None:
        with accepted.readers, ExitStack() as room:
            room.callback(accepted.share.give_back)
            done = await handlers.finish_tensors(accepted, session, tenant)
            if done.tensors:
                pieces = TensorAnswer(_named(done.body, name), done.tensors).pieces()
                async with self._sending:
                    await self._socket.send({"type": "websocket.send", PIECES: pieces})
            else:
                await self._send(done.body, name)

    async def _text(
        self, name: str | int | None, cell: Cell, readers: Readers, *, background: bool, streamed: bool
    ) -> None:
        with readers:
            if background:
                await self._send(await handlers.background(cell, readers), name)
            elif streamed:
                async for body in handlers.text_objects(cell, readers):
                    await self._send(body, name)
            else:
                await self._send((await handlers.finish_text(cell, readers)).body, name)

    async def _refuse(self, error: BlockrelayError, message: SocketMessage) -> None:
        self._gateway.responder.count("/v1/infer/ws", error)
        await self._send(infer_error(error, message.session), message.name)

    async def _send(self, body: dict[str, Any], name: str | int | None) -> None:
        async with self._sending:
            await self._socket.send_text(to_json(_named(body, name)).decode())


def _named(body: dict[str, Any], name: str | int | None) -> dict[str, Any]:
    return body if name is None else {"id": name, **body}
