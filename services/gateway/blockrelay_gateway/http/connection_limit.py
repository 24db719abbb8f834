"""Limits the requests and WebSockets that this process serves at once."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import LimitExceeded
from blockrelay_gateway.http.authentication import is_open
from blockrelay_gateway.http.errors import ErrorResponder, retry_after_s


class ConnectionLimit:
    """ASGI middleware that answers 503 while `max_connections` requests and sockets are open.

    Requests that need no key (`is_open`) pass. `Authentication` must have put the tenant into the scope before. A key
    may have at most as many as are still free, else it gets 429: so one key leaves half for others, and any number of
    keys leave something for the next.
    """

    def __init__(self, app: ASGIApp, max_connections: int, responder: ErrorResponder) -> None:
        self._app, self._max, self._responder = app, max_connections, responder
        self._now = 0  # open requests and sockets
        self._of: Counter[str] = Counter()  # the same by tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or is_open(scope):
            await self._app(scope, receive, send)
            return
        tenant: Tenant = scope["state"]["tenant"]
        if error := self._refusal(tenant.name):
            await self._responder.refuse(error, scope, receive, send)
            return
        with self._inside(tenant.name):
            await self._app(scope, receive, send)

    def _refusal(self, tenant: str) -> LimitExceeded | None:
        if self._now >= self._max:
            message = f"{self._now} requests are under way at this gateway, its limit; try again later"
            return LimitExceeded(message, scope="cell", limit="connections", retry_after_s=retry_after_s(0))
        if tenant and self._of[tenant] >= self._max - self._now:
            message = (
                f"{self._of[tenant]} requests and sockets of this key are open at this gateway, its share; close some"
            )
            return LimitExceeded(message, scope="client", limit="connections", retry_after_s=retry_after_s(0))
        return None

    @contextmanager
    def _inside(self, tenant: str) -> Iterator[None]:
        self._now += 1
        self._of[tenant] += 1
        try:
            yield
        finally:
            self._now -= 1
            self._of[tenant] -= 1
            if not self._of[tenant]:
                del self._of[tenant]
