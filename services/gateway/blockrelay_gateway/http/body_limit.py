"""What happens to every HTTP request before its route: the body limit and the request id header. Plain ASGI, because
Starlette's BaseHTTPMiddleware hides the client's disconnect from streaming routes."""

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockrelay.errors import LimitExceeded, RequestTooLarge, RequestTooSlow, ServiceUnavailable
from blockrelay_gateway.http.body_budget import SMALL_BODY, BodyBudget, BodyShare, BodyTimeout, ReceivedBody
from blockrelay_gateway.http.errors import ErrorResponder

#: A client that sends too much is read on for a while: closing at once would reset the connection before it could read
#: our answer.
DRAIN_FACTOR = 8
DRAIN_IDLE_S = 0.5
#: Where a scope has the ReceivedBody. Routes that take it from there keep nothing of it; others get it as messages.
RECEIVED = "blockrelay.body"


class BodyLimit:
    """Reads the whole body, chunked or not, before the route runs; 413 when it is over `max_bytes`, 408 when it never
    comes.

    Every body of ours is JSON, whatever its content type claims (`curl -d` claims a form); pages of other sites, which
    need no preflight for a form, do not get here (`origins`). Routes find the body's true size in `content-length`.
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
        declared = dict(scope["headers"]).get(b"content-length", b"")
        large = not declared.isdigit() or int(declared) > SMALL_BODY
        share = BodyShare(self._budget, large=large, tenant=scope["state"]["tenant"].name)
        try:
            received = await self._timeout.wait(self._read(scope, receive, share))
            if received is not None:
                await self._pass_on(received, scope, receive, _releasing(send, share))
        except (RequestTooLarge, RequestTooSlow, LimitExceeded, ServiceUnavailable) as error:
            share.give_back()
            answer = self._responder.answer(scope, error)
            if isinstance(error, RequestTooSlow | ServiceUnavailable):
                answer.headers["connection"] = "close"  # what may still come belongs to no request
            await answer(scope, receive, send)
        finally:
            share.give_back()

    async def _read(self, scope: Scope, receive: Receive, share: BodyShare) -> ReceivedBody | None:
        """The whole body; None when the client left before its end. Raises RequestTooLarge, or LimitExceeded."""
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
                # All of it at once: of many that arrive together some find room, where else each would for a part only.
                share.take(new := max(size, announced if size else 0) - taken)
                taken += new
            except LimitExceeded:
                parts.clear()
                if more:
                    await self._drain(receive)
                raise
            parts.append(part)
        if too_large:
            parts.clear()
            if more and (size or not _waits(scope)):
                await self._drain(receive)
            raise RequestTooLarge(f"the body is over the limit of {self._max_bytes} bytes")
        return ReceivedBody(b"".join(parts), share)

    async def _pass_on(self, received: ReceivedBody, scope: Scope, receive: Receive, send: Send) -> None:
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

    async def _drain(self, receive: Receive) -> None:
        left, more = DRAIN_FACTOR * self._max_bytes, True
        with contextlib.suppress(TimeoutError):
            while more and left > 0:
                async with asyncio.timeout(DRAIN_IDLE_S):
                    message = await receive()
                left -= len(message.get("body", b""))
                more = message.get("more_body", False)


def _waits(scope: Scope) -> bool:
    """Its client sends the body when it is asked to, as the first look at it does."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])


def _releasing(send: Send, share: BodyShare) -> Send:
    """`send` that gives the body's bytes back when the answer begins."""

    async def released(message: Message) -> None:
        share.give_back()
        await send(message)

    return released
