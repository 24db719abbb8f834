"""How many requests and sockets this process serves at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from blockrelay.errors import LimitExceeded
from blockrelay_gateway.http.authentication import is_open
from blockrelay_gateway.http.errors import ErrorResponder, retry_after_s


class ConnectionLimit:
    """Plain ASGI: answers 503 while `max_connections` requests and sockets are open; health and metrics pass."""

    def __init__(self, app: ASGIApp, max_connections: int, responder: ErrorResponder) -> None:
        self._app, self._max, self._responder = app, max_connections, responder
        self._now = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or is_open(scope):
            await self._app(scope, receive, send)
            return
        if self._now >= self._max:
            said = f"{self._now} requests are under way at this gateway, its limit; try again later"
            error = LimitExceeded(said, scope="cell", limit="connections", retry_after_s=retry_after_s(0))
            if scope["type"] == "http":
                await self._responder.answer(scope, error)(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1013, "reason": str(error)})
            return
        with self._inside():
            await self._app(scope, receive, send)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._now += 1
        try:
            yield
        finally:
            self._now -= 1
