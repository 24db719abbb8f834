"""Refuses requests of other sites' web pages (`Origin`, CORS) and requests to foreign host names (`Host`).

A web page can send requests and open WebSockets to every address that its visitor's browser reaches, 127.0.0.1
included. A page whose own name was made to point here (DNS rebinding) can read the answers too. Browsers show both in
headers that a page cannot set; other clients send no `Origin` and are not affected.
"""

from collections.abc import Iterable, Sequence

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from blockrelay.auth.web_origins import Rules
from blockrelay.errors import ForeignOrigin, UnknownHost
from blockrelay_gateway.http.authentication import PROBES
from blockrelay_gateway.http.errors import ErrorResponder
from blockrelay_gateway.http.front import methods_of, with_headers
from blockrelay_gateway.policy import PREFLIGHT_S

#: Answer headers that a page of an allowed origin may read.
EXPOSED = (
    b"x-request-id, x-client-request-id, retry-after, idempotent-replayed, x-blockrelay-ignored, x-blockrelay-seed, "
    b"x-blockrelay-max-tokens, blockrelay-instead-of, preference-applied"
)


class Origins:
    """ASGI middleware that refuses by `rules` before a body is read, with 403 or 421, and does CORS.

    The paths in PROBES may use any host name.
    """

    def __init__(self, app: ASGIApp, rules: Rules, routes: Sequence[BaseRoute], responder: ErrorResponder) -> None:
        """`routes` are all routes, whose methods preflights ask for."""
        self._app, self._rules, self._responder, self._routes = app, rules, responder, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        try:
            if scope["path"] not in PROBES:
                self._rules.check_host(hosts)
            guest = self._rules.check_origin(origins, hosts, _values(scope, b"x-forwarded-host"))
        except (UnknownHost, ForeignOrigin) as error:
            await self._responder.refuse(error, scope, receive, send)
            return
        if guest is None or scope["type"] == "websocket":
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and _values(scope, b"access-control-request-method"):
            await self._preflight(guest, scope, send)
        else:
            await self._app(scope, receive, _for(guest, send))

    async def _preflight(self, guest: str, scope: Scope, send: Send) -> None:
        """Answers a preflight: the page may use the route's methods and any header; the key is checked later."""
        headers = [
            (b"access-control-allow-origin", guest.encode("latin-1")),
            (b"access-control-allow-methods", ", ".join(methods_of(self._routes, scope)).encode()),
            (b"access-control-max-age", str(PREFLIGHT_S).encode()),
            (b"vary", b"origin, access-control-request-method, access-control-request-headers"),
        ]
        if wanted_headers := _values(scope, b"access-control-request-headers"):
            headers.append((b"access-control-allow-headers", ", ".join(wanted_headers).encode("latin-1")))
        private = _values(scope, b"access-control-request-private-network") == ["true"]
        if private and guest.lower() in self._rules.origins:
            headers.append((b"access-control-allow-private-network", b"true"))
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def _for(guest: str, send: Send) -> Send:
    """Returns a `send` that lets a page of the origin `guest` read the answer."""
    ours = [
        (b"access-control-allow-origin", guest.encode("latin-1")),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"origin"),
    ]
    return with_headers(send, lambda headers, _: [*headers, *ours])


def _values(scope: Scope, header: bytes) -> list[str]:
    """All values of a request header, in order."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return [value.decode("latin-1") for name, value in headers if name == header]
