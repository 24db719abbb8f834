"""The WebSocket of /v1/infer: one conversation, several messages under way."""

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
from blockrelay_gateway.api.client_headers import client_headers
from blockrelay_gateway.api.infer import handlers
from blockrelay_gateway.api.infer.responses import TensorAnswer
from blockrelay_gateway.api.intake import Intake, content_of
from blockrelay_gateway.api.reading import Reading, Sender, Tensors, Text
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.draining.drain import RESTART_CODE, RESTART_REASON
from blockrelay_gateway.http import authentication
from blockrelay_gateway.http.body_budget import BodyBudget, BodyShare, ReceivedBody
from blockrelay_gateway.http.body_limit import RECEIVED
from blockrelay_gateway.http.errors import infer_error, to_json
from blockrelay_gateway.http.server import PIECES
from blockrelay_gateway.streaming.readers import Readers

#: Messages of one socket that are under way at once; more wait.
SOCKET_REQUESTS = 64
_OPENING = re.compile(rb"\s*\{")
_NAME = re.compile(rb'\s*"(id|session_id)"\s*:\s*("[^"\\\\\x00-\x1f]{0,1000}"|-?[0-9]{1,18})\s*,')


async def converse(gateway: Gateway, socket: WebSocket) -> None:
    """Until the client leaves, or its key is removed or the gateway ends, and nothing is under way any more."""
    time_to_leave = gateway.drain.time_to_leave()
    await socket.accept()
    conversation = Conversation(gateway, socket)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_watch_key(conversation, socket))
            tasks.create_task(_leave_when_it_is_time(conversation, socket, time_to_leave))
            try:
                while True:
                    letter = Letter(await received(socket), conversation.bodies)
                    if conversation.leaving:  # its close code says that what has no answer is to be sent again
                        letter.close()
                        continue
                    conversation.begin()
                    try:
                        await conversation.room.acquire()
                    except asyncio.CancelledError:
                        letter.close()
                        raise
                    answering = tasks.create_task(conversation.answer(letter))
                    answering.add_done_callback(partial(conversation.over, letter))
            except KeyError:
                await socket.close(code=1003, reason="send text messages, not binary ones")
                raise _Left from None
            except WebSocketDisconnect:
                raise _Left from None
    except* (_Left, WebSocketDisconnect):  # the latter from a task that was sending
        pass


async def received(socket: WebSocket) -> Message:
    """The next message. Raises WebSocketDisconnect."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"], message.get("reason"))
    return message


async def _watch_key(conversation: "Conversation", socket: WebSocket) -> None:
    """Close the socket of a key that is there no more, once what was accepted has been answered."""
    while True:
        await asyncio.sleep(authentication.LOOK_S)
        try:
            authentication.asked_again(socket)
        except Unauthorized as error:
            if conversation.under_way == 0:
                await socket.close(code=1008, reason=str(error))
                raise _Left from None


async def _leave_when_it_is_time(conversation: "Conversation", socket: WebSocket, time_to_leave: asyncio.Event) -> None:
    """Take no more messages, and close the socket once those that were taken have been answered."""
    await time_to_leave.wait()
    conversation.leaving = True
    await conversation.idle.wait()
    await socket.close(code=RESTART_CODE, reason=RESTART_REASON)
    raise _Left


class _Left(Exception):
    """The conversation is over: ends the task group, which releases all readers."""


class Letter:
    """One message, as long as it is needed: its bytes count among those of all bodies until it is accepted or refused,
    and neither its text nor what was parsed of it is kept any longer."""

    def __init__(self, message: Message, bodies: BodyBudget) -> None:
        """Raises KeyError for a binary message."""
        self.name: str | int | None = None
        self.session: str | None = None
        self._refusal: LimitExceeded | None = None
        large: ReceivedBody | None = message.get(RECEIVED)
        if large is not None:
            self._raw, self._share = large.take(), large.share
            return
        self._raw, self._share = message["text"].encode(), BodyShare(bodies)
        try:
            self._share.take(len(self._raw))
        except LimitExceeded as error:
            self._refusal = error

    async def read(self, intake: Intake, sender: Sender) -> Text | Tensors:
        """What it says. `name` and `session` are those that an answer needs. Raises LimitExceeded, BadRequest and what
        `Helpers.run` raises."""
        raw, self._raw = self._raw, b""
        self.name, self.session = names_at_start(raw)
        if self._refusal is not None:
            raise self._refusal
        read = await intake.read(raw, sender, self._share, Reading.message)
        self.name, self.session = read.name, read.session_id
        return content_of(read)

    def close(self) -> None:
        """Its request has been accepted or refused. Idempotent."""
        self._share.give_back()


def names_at_start(raw: bytes) -> tuple[Any, Any]:
    """`id` and `session_id` of a message where they are its first fields: those of one that is not parsed."""
    found: dict[str, Any] = {}
    place = _OPENING.match(raw)
    while place is not None and (field := _NAME.match(raw, place.end())) is not None:
        found[field[1].decode()], place = json.loads(field[2].decode("utf-8", "replace")), field
    return found.get("id"), found.get("session_id")


class Conversation:
    """One socket. Messages are answered by tasks of their own; only sending is exclusive."""

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
        """A message was taken; `answer` has to follow."""
        self.under_way += 1
        self.idle.clear()

    async def answer(self, letter: Letter) -> None:
        """Answer one message, whatever is in it."""
        try:
            finish = await self._begin(letter)
            letter.close()
            await finish
        except BlockrelayError as error:
            if isinstance(error, RedisTrouble):
                self._gateway.cells.met(error)
            await self._refuse(error, letter)
        finally:
            letter.close()
            self.under_way -= 1
            if not self.under_way:
                self.idle.set()

    def over(self, letter: Letter, _: asyncio.Task[None]) -> None:
        """A message was answered, or its client has left, perhaps before `answer` had its first turn."""
        letter.close()
        self.room.release()

    async def _begin(self, letter: Letter) -> Coroutine[Any, Any, None]:
        """Have the request accepted; what is left to do does not need the message any more."""
        gateway = self._gateway
        sender = Sender(authentication.of(self._socket).name, client_headers(self._socket.headers))
        asked = await letter.read(gateway.intake, sender)
        tenant = authentication.asked_again(self._socket)  # of the same name, with the limits that it has now
        if isinstance(asked, Tensors):
            session = asked.request.session_id
            return self._tensors(letter.name, session, await handlers.submit_tensors(gateway, asked, tenant), tenant)
        cell, readers = await gateway.submission.submit(asked.asked, tenant)
        return self._text(letter.name, cell, readers, background=asked.background, streamed=asked.stream)

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

    async def _refuse(self, error: BlockrelayError, letter: Letter) -> None:
        self._gateway.responder.count("/v1/infer/ws", error)
        await self._send(infer_error(error, letter.session), letter.name)

    async def _send(self, body: dict[str, Any], name: str | int | None) -> None:
        async with self._sending:
            await self._socket.send_text(to_json(_named(body, name)).decode())


def _named(body: dict[str, Any], name: str | int | None) -> dict[str, Any]:
    return body if name is None else {"id": name, **body}
