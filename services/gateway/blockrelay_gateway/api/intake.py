"""Reads the bodies of requests, and gives their memory back once they are accepted or refused.

Bodies up to a few kilobytes are read on the event loop, larger ones and those with a grammar in a thread,
and those that would hold the interpreter for longer than a few milliseconds in a helper process.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from fastapi import Request

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import RequestError, ServiceUnavailable
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission.idempotency import HEADER
from blockrelay_gateway.api.client_headers import client_headers
from blockrelay_gateway.api.reading import BodyReader, Read, RequestOrigin, Tensors, reading_of
from blockrelay_gateway.api.structured_output import MARKS
from blockrelay_gateway.helpers.json_size import parsed_bytes
from blockrelay_gateway.helpers.pool import Helpers
from blockrelay_gateway.http import authentication
from blockrelay_gateway.http.body_budget import BodyShare, ReceivedBody
from blockrelay_gateway.http.body_limit import RECEIVED
from blockrelay_gateway.policy import HELPER_BODY_BYTES, HELPER_NICENESS, HELPER_PARSED_BYTES, OFFLOAD_BYTES

T = TypeVar("T")
#: A method of BodyReader: it reads the body of one route.
How = Callable[[BodyReader, bytes, RequestOrigin], Read[T]]
#: Characters of an error message, and of a field's name, that a helper returns: both may repeat content of the body.
MESSAGE_CHARS = 2000
#: In a helper process: its BodyReader, by the model's name in Redis.
_made: dict[str, BodyReader] = {}


@dataclass(frozen=True, slots=True)
class BodyIntake:
    """Reads bodies for one gateway: with `reading` in this process, or in one of its `helpers`."""

    settings: GatewaySettings
    reading: BodyReader
    helpers: Helpers

    async def body(self, request: Request, how: How[T]) -> T:
        """Returns the content of a request's body, read by the method `how`. The request has passed `BodyLimit`.

        The body's memory is given back, except that of a tensor step, whose KV needs it until `accepted` is called.
        A second call for the same request would read an empty body. Raises the refusal of a wrong body (BadRequest, or
        NotFound for another model), and BadRequest for a wrong header. Raises RequestTooLarge, ServiceUnavailable and
        BlockFolderError in the cases that `read` names.
        """
        received: ReceivedBody = request.scope[RECEIVED]
        keys = tuple(request.headers.getlist(HEADER))
        tenant = authentication.of(request)
        sender = RequestOrigin(tenant.name, client_headers(request.headers), keys)
        kept = False
        try:
            read = await self.read(received.take(), sender, received.share, how)
            kept = isinstance(read.content, Tensors)
        finally:
            if not kept:
                received.share.give_back()
        request.state.session_id = read.session_id  # errors name it
        return content_of(read)

    async def read(self, raw: bytes, sender: RequestOrigin, share: BodyShare, how: How[T]) -> Read[T]:
        """Reads `raw`, whose bytes `share` holds already; a helper's parsed JSON is added to `share`.

        The result has the refusal of a wrong body. Raises RequestTooLarge for a body that takes too much memory when
        parsed. Raises ServiceUnavailable if no helper reads it within HELPER_CALL_S seconds, if helpers die over it, or
        if the model's folder has changed. Raises BlockFolderError if a helper can no longer use the folder.
        """
        if len(raw) < OFFLOAD_BYTES and not any(mark in raw for mark in MARKS):
            return how(self.reading, raw, sender)
        parsed = await asyncio.to_thread(parsed_bytes, raw)
        if len(raw) < HELPER_BODY_BYTES and parsed < HELPER_PARSED_BYTES:
            return await asyncio.to_thread(how, self.reading, raw, sender)
        share.check_parsed(parsed)
        room = partial(share.take_parsed, parsed)
        work = (self.settings, self.reading.model_key, how.__name__, raw, sender)
        return cast(Read[T], await self.helpers.run(sender.tenant, _read, *work, room=room))


def accepted(request: Request) -> None:
    """Gives back the memory of a request's body: its request was accepted, and nothing of the body is kept."""
    request.scope[RECEIVED].share.give_back()


def content_of(read: Read[T]) -> T:
    """Returns the content of a body that was read, or raises its refusal."""
    if read.refusal is not None:
        raise read.refusal
    assert read.content is not None
    return read.content


def _read(settings: GatewaySettings, model_key: str, how: str, raw: bytes, sender: RequestOrigin) -> Read[object]:
    """Reads a body in a helper process, with the method of BodyReader that is named `how`."""
    read: Read[object] = getattr(_reading(settings, model_key), how)(raw, sender)
    error = read.refusal
    if error is not None and len(str(error)) > MESSAGE_CHARS:
        error.args = (f"{str(error)[:MESSAGE_CHARS]}...",)
    if isinstance(error, RequestError) and error.param is not None:
        error.param = error.param[:MESSAGE_CHARS]
    return read


def _reading(settings: GatewaySettings, model_key: str) -> BodyReader:
    """The BodyReader of a helper process, made at its first body.

    Raises ServiceUnavailable if the model's folder is not the one that the gateway has opened, and BlockFolderError if
    it can no longer be used.
    """
    if model_key in _made:
        return _made[model_key]
    if not _made:
        os.nice(HELPER_NICENESS)
    folder = open_block_folder(settings.model, blocks=())
    if folder.model_key != model_key:
        raise ServiceUnavailable("the model's folder has changed since this gateway was started: restart it")
    _made[model_key] = reading_of(settings, folder)
    return _made[model_key]
