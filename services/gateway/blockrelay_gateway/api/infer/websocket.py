"""The WebSocket of /v1/infer: one conversation, several messages under way."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import ValidationError

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import BadRequest, BlockrelayError, LimitExceeded, RedisTrouble, Unauthorized
from blockrelay_gateway.api.client_headers import client_headers
from blockrelay_gateway.api.infer import handlers
from blockrelay_gateway.api.infer.responses import TensorAnswer
from blockrelay_gateway.api.infer.schemas import InferRequest
from blockrelay_gateway.api.state import Gateway
from blockrelay_gateway.cells.cell import Cell
from blockrelay_gateway.http import authentication
from blockrelay_gateway.http.body_budget import BodyBudget, BodyShare
from blockrelay_gateway.http.errors import from_validation, infer_error, to_json
from blockrelay_gateway.http.server import PIECES
from blockrelay_gateway.streaming.readers import Readers

#: Messages of one socket that are under way at once; more wait.
SOCKET_REQUESTS = 64


async def converse(gateway: Gateway, socket: WebSocket) -> None:
    """Until the client leaves, or its key is removed and nothing is under way any more."""
    await socket.accept()
    conversation = Conversation(gateway, socket)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_watch_key(conversation, socket))
            try:
                while True:
                    letter = Letter(await socket.receive_text(), conversation.bodies)
                    await conversation.room.acquire()
                    tasks.create_task(conversation.answer(letter)).add_done_callback(
                        lambda _: conversation.room.release()
                    )
            except KeyError:
                await socket.close(code=1003, reason="send text messages, not binary ones")
                raise _Left from None
            except WebSocketDisconnect:
                raise _Left from None
    except* (_Left, WebSocketDisconnect):  # the latter from a task that was sending
        pass


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


class _Left(Exception):
    """The conversation is over: ends the task group, which releases all readers."""


class Letter:
    """One message, as long as it is needed: its bytes count among those of all bodies until it is accepted or refused,
    and neither its text nor what was parsed of it is kept any longer."""

    def __init__(self, text: str, bodies: BodyBudget) -> None:
        self.name: str | int | None = None
        self.session: str | None = None
        self.size = len(text) if text.isascii() else len(text.encode())
        self._text, self._share = text, BodyShare(bodies)
        self._refusal: LimitExceeded | None = None
        try:
            self._share.take(self.size)
        except LimitExceeded as error:
            self._refusal = error
            with suppress(BadRequest):
                self._parse()  # at once: what is refused is told by name, and waits for nothing
            self._text = ""

    def read(self) -> InferRequest:
        """The request in it. `name` and `session` are those that an answer needs. Raises LimitExceeded, BadRequest."""
        if self._refusal is not None:
            raise self._refusal
        content = self._parse()
        self._text = ""
        try:
            return InferRequest.model_validate(content)
        except ValidationError as error:
            raise from_validation(error.errors()) from None

    def close(self) -> None:
        """Its request has been accepted or refused. Idempotent."""
        self._share.give_back()

    def _parse(self) -> object:
        try:
            content = json.loads(self._text)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the message is not JSON: {error}") from None
        if isinstance(content, dict):
            self.name, self.session = _plain(content, "id"), _plain(content, "session_id")  # pyright: ignore
        return content


class Conversation:
    """One socket. Messages are answered by tasks of their own; only sending is exclusive."""

    def __init__(self, gateway: Gateway, socket: WebSocket) -> None:
        self._gateway, self._socket = gateway, socket
        self._sending = asyncio.Lock()
        self.under_way = 0  # messages that are being answered
        self.room = asyncio.Semaphore(SOCKET_REQUESTS)
        self.bodies = gateway.bodies

    async def answer(self, letter: Letter) -> None:
        """Answer one message, whatever is in it."""
        self.under_way += 1
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

    async def _begin(self, letter: Letter) -> Coroutine[Any, Any, None]:
        """Have the request accepted; what is left to do does not need the message any more."""
        request, name = letter.read(), letter.name
        keys = [] if request.idempotency_key is None else [request.idempotency_key]
        gateway, tenant = self._gateway, authentication.asked_again(self._socket)
        who, headers = gateway.identify(keys, request, tenant, "infer"), client_headers(self._socket.headers)
        if handlers.is_tensor_form(request):
            accepted = await handlers.submit_tensors(gateway, request, who, headers, tenant, size=letter.size)
            return self._tensors(name, request.session_id, accepted, tenant)
        asked = await handlers.text_request(gateway, request, who, headers)
        cell, readers = await gateway.submission.submit([asked], tenant)
        return self._text(name, cell, readers, background=bool(request.background), streamed=bool(request.stream))

    async def _tensors(
        self, name: str | int | None, session: str | None, accepted: handlers.AcceptedStep, tenant: Tenant
    ) -> None:
        with accepted.readers:
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


def _plain(content: dict[str, Any], name: str) -> Any:
    value = content.get(name)
    return value if isinstance(value, str | int) else None
