"""Reads the bodies of HTTP requests before their routes run, within limits of size, memory and time.

GET, HEAD and OPTIONS pass unread, and so do WebSockets.

It is plain ASGI, because Starlette's BaseHTTPMiddleware hides the client's disconnect from streaming routes.
"""

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockrelay.errors import LimitExceeded, RequestTooLarge, RequestTooSlow, ServiceUnavailable
from blockrelay_gateway.http.body_budget import BodyBudget, BodyShare, BodyTimeout, ReceivedBody
from blockrelay_gateway.http.errors import ErrorResponder
from blockrelay_gateway.policy import DRAIN_FACTOR, DRAIN_IDLE_S, SMALL_BODY_BYTES

#: Key of the ReceivedBody in a scope. Routes that take it from there keep no copy; others get the body as a message.
RECEIVED = "blockrelay.body"
#: Key of the body's size in a scope's state, once it was read.
BODY_BYTES = "body_bytes"


class BodyLimit:
    """ASGI middleware that reads the whole body, chunked or not, before the route runs.

    It answers 413 for a body over `max_bytes`, 408 for one that does not arrive, 429 or 503 without room in `budget`,
    and 503 if the gateway ends first. `Authentication` must have put the tenant into the scope before. Every body is
    taken for JSON, whatever its content type says (`curl -d` says a form); pages of other sites, which need no
    preflight for a form, do not get here (`origins`). Routes find the body's true size in `content-length`.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, budget: BodyBudget, timeout: BodyTimeout, responder: ErrorResponder
    ) -> None:
        self._app, self._max_bytes = app, max_bytes
        self._budget, self._timeout, self._responder = budget, timeout, responder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        share = BodyShare(self._budget, large=not is_small(scope), tenant=scope["state"]["tenant"].name)
        try:
            received = await self._timeout.wait(self._read(scope, receive, share))
            if received is not None:
                await self._pass_on(received, scope, receive, _releasing(send, share))
        except (RequestTooLarge, RequestTooSlow, LimitExceeded, ServiceUnavailable) as error:
            share.give_back()
            answer = self._responder.answer(scope, error)
            if isinstance(error, RequestTooSlow | ServiceUnavailable):
                answer.headers["connection"] = "close"  # the rest of the body may still come, and is no request
            await answer(scope, receive, send)
        finally:
            share.give_back()

    async def _read(self, scope: Scope, receive: Receive, share: BodyShare) -> ReceivedBody | None:
        """Reads the whole body; None if the client left before its end. Raises RequestTooLarge or LimitExceeded."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        announced = int(declared) if declared.isdigit() else 0
        size, taken, too_large, more = 0, 0, announced > self._max_bytes, True
        parts: list[bytes] = []
        while more and not too_large:
            message = await receive()
            if message["type"] != "http.request":
                return None
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            too_large = size > self._max_bytes
            try:
                # Room for the whole body is taken at once: of many bodies that arrive together some then fit entirely.
                share.take(new := max(size, announced if size else 0) - taken)
                taken += new
            except LimitExceeded:
                parts.clear()
                if more:
                    await drained(receive, self._max_bytes)
                raise
            parts.append(part)
        if too_large:
            parts.clear()
            if more and (size or not waits_to_send(scope)):
                await drained(receive, self._max_bytes)
            raise RequestTooLarge(f"the body is over the limit of {self._max_bytes} bytes")
        scope["state"][BODY_BYTES] = size
        return ReceivedBody(b"".join(parts), share)

    async def _pass_on(self, received: ReceivedBody, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the route with the body in the scope, and as one message for routes that read messages."""
        replayed = False
        ours = {b"content-type": b"application/json", b"content-length": str(received.size).encode()}

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": received.take(), "more_body": False}

        headers = [header for header in scope["headers"] if header[0] not in ours]
        await self._app({**scope, RECEIVED: received, "headers": [*headers, *ours.items()]}, replay, send)


def is_small(scope: Scope) -> bool:
    """True if a request says that its body has at most SMALL_BODY_BYTES."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    return declared.isdigit() and int(declared) <= SMALL_BODY_BYTES


async def drained(receive: Receive, max_bytes: int) -> None:
    """Reads and drops the rest of a body, within DRAIN_FACTOR times `max_bytes` and DRAIN_IDLE_S."""
    left, more = DRAIN_FACTOR * max_bytes, True
    with contextlib.suppress(TimeoutError):
        while more and left > 0:
            async with asyncio.timeout(DRAIN_IDLE_S):
                message = await receive()
            left -= len(message.get("body", b""))
            more = message.get("more_body", False)


def waits_to_send(scope: Scope) -> bool:
    """True if the client waits for `100 Continue` before it sends the body."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])


def _releasing(send: Send, share: BodyShare) -> Send:
    """Returns a `send` that gives the body's bytes back when the answer begins."""

    async def released(message: Message) -> None:
        share.give_back()
        await send(message)

    return released
