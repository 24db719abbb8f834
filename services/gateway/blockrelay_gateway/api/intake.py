"""Bodies on their way in: who reads one, the memory that it takes meanwhile, and that nothing of it stays.

Bodies up to a few kilobytes are read at once, larger ones in a thread, and those whose reading would hold the
interpreter for longer than a few milliseconds in a helper process.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from fastapi import Request

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import BadRequest, Conflict, NotFound, ServiceUnavailable
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission.idempotency import HEADER
from blockrelay_gateway.api.client_headers import client_headers
from blockrelay_gateway.api.reading import Read, Reading, Sender, Tensors, reading_of
from blockrelay_gateway.helpers.json_size import parsed_bytes
from blockrelay_gateway.helpers.offload import LARGE as NOT_SMALL
from blockrelay_gateway.helpers.pool import Helpers
from blockrelay_gateway.http import authentication
from blockrelay_gateway.http.body_budget import BodyShare, ReceivedBody
from blockrelay_gateway.http.body_limit import RECEIVED

T = TypeVar("T")
#: One way of reading: a method of Reading.
How = Callable[[Reading, bytes, Sender], Read[T]]
#: Bytes of a body, and of what is parsed of it, from which a helper reads it: this process would stand still for 5 ms.
LARGE, LARGE_PARSED = 256 << 10, 2 << 20
#: Characters of a message, and of a field's name, about a body that a helper has read: both may repeat what is in it.
MESSAGE_CHARS = 2000
#: Helpers yield to the gateway where cores are short.
NICENESS = 10
#: In a helper: what it reads with, by the model's name in Redis.
_made: dict[str, Reading] = {}


@dataclass(frozen=True, slots=True)
class Intake:
    """Reads bodies of a gateway with these settings."""

    settings: GatewaySettings
    reading: Reading
    helpers: Helpers

    async def body(self, request: Request, how: How[T]) -> T:
        """What the body of a request says. KV that came with a tensor step keeps the room of the body until `accepted`.
        Raises BadRequest and what `helpers` raises."""
        received: ReceivedBody = request.scope[RECEIVED]
        keys = tuple(request.headers.getlist(HEADER))
        tenant = authentication.of(request)
        sender = Sender(tenant.name, client_headers(request.headers), keys)
        kept = False
        try:
            read = await self.read(received.take(), sender, received.share, how)
            kept = isinstance(read.content, Tensors)
        finally:
            if not kept:
                received.share.give_back()
        request.state.session_id = read.session_id  # errors name it
        return content_of(read)

    async def read(self, raw: bytes, sender: Sender, share: BodyShare, how: How[T]) -> Read[T]:
        """What is read of `raw`, whose bytes are in `share`; what a helper parses of them comes there too."""
        if len(raw) < NOT_SMALL:
            return how(self.reading, raw, sender)
        parsed = await asyncio.to_thread(parsed_bytes, raw)
        if len(raw) < LARGE and parsed < LARGE_PARSED:
            return await asyncio.to_thread(how, self.reading, raw, sender)
        share.check_parsed(parsed)
        room = partial(share.take_parsed, parsed)
        work = (self.settings, self.reading.model_key, how.__name__, raw, sender)
        return cast(Read[T], await self.helpers.run(sender.tenant, _read, *work, room=room))


def accepted(request: Request) -> None:
    """Nothing of what came with the body is kept any longer."""
    request.scope[RECEIVED].share.give_back()


def content_of(read: Read[T]) -> T:
    """Return what was read, or raise why it is refused."""
    if read.refusal is not None:
        raise read.refusal
    assert read.content is not None
    return read.content


def _read(settings: GatewaySettings, model_key: str, how: str, raw: bytes, sender: Sender) -> Read[object]:
    """Read a body in a helper process, by the method of Reading that is named `how`."""
    found: Read[object] = getattr(_reading(settings, model_key), how)(raw, sender)
    error = found.refusal
    if error is not None and len(str(error)) > MESSAGE_CHARS:
        error.args = (f"{str(error)[:MESSAGE_CHARS]}...",)
    if isinstance(error, BadRequest | NotFound | Conflict) and error.param is not None:
        error.param = error.param[:MESSAGE_CHARS]
    return found


def _reading(settings: GatewaySettings, model_key: str) -> Reading:
    """Made once in each helper. Raises ServiceUnavailable where the folder is not that which the gateway has opened."""
    if model_key in _made:
        return _made[model_key]
    if not _made:
        os.nice(NICENESS)
    folder = open_block_folder(settings.model, blocks=())
    if folder.model_key != model_key:
        raise ServiceUnavailable("the model's folder has changed since this gateway was started: restart it")
    _made[model_key] = reading_of(settings, folder)
    return _made[model_key]
