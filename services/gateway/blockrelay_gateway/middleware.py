"""What happens to every HTTP request before its route: the body limit and the request id header. Plain ASGI, because
Starlette's BaseHTTPMiddleware hides the client's disconnect from streaming routes."""

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockrelay.errors import RequestTooLarge
from blockrelay_gateway.http_errors import Refusals

#: A client that sends too much is read on for a while: closing at once would reset the connection before it could read
#: our answer.
DRAIN_FACTOR = 8
DRAIN_IDLE_S = 0.5


class BodyLimit:
    """Reads the whole body, chunked or not, before the route runs; 413 when it is over `max_bytes`.

    Every body of ours is JSON, whatever its content type claims (`curl -d` claims a form). Routes find the body's true
    size in `content-length`.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, refusals: Refusals) -> None:
        self._app, self._max_bytes, self._refusals = app, max_bytes, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        too_large = declared.isdigit() and int(declared) > self._max_bytes
        parts: list[bytes] = []
        size, more = 0, True  # of the body
        while more and not too_large:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client left in the middle of its body
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            too_large = size > self._max_bytes
            more = message.get("more_body", False)
        if too_large:
            if more:
                await self._drain(receive)
            error = RequestTooLarge(f"the body is over the limit of {self._max_bytes} bytes")
            await self._refusals.answer(scope, error)(scope, receive, send)
            return
        body: bytes | None = b"".join(parts)
        ours = {b"content-type": b"application/json", b"content-length": str(size).encode()}

        async def replay() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            message: Message = {"type": "http.request", "body": body, "more_body": False}
            body = None
            return message

        headers = [header for header in scope["headers"] if header[0] not in ours]
        json_scope = {**scope, "headers": [*headers, *ours.items()]}
        await self._app(json_scope, replay, send)

    async def _drain(self, receive: Receive) -> None:
        left, more = DRAIN_FACTOR * self._max_bytes, True
        with contextlib.suppress(TimeoutError):
            while more and left > 0:
                message = await asyncio.wait_for(receive(), DRAIN_IDLE_S)
                left -= len(message.get("body", b""))
                more = message.get("more_body", False)
