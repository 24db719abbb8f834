"""Features that every route has: HEAD, OPTIONS, a path prefix, and the client's own request id."""

import re
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockrelay_gateway.draining.drain import Drain

#: A client may send its own id in the first header; the answer repeats it in the second, and has ours in the first.
REQUEST_ID, CLIENT_REQUEST_ID = b"x-request-id", b"x-client-request-id"
CLOSE = (b"connection", b"close")
#: Set in the scope of a HEAD request, which routes see as a GET: its answer needs no body.
IS_HEAD = "blockrelay.head"
Headers = list[tuple[bytes, bytes]]
_SCHEME = re.compile(r"(?i)https?://([^/?#]*)(.*)", re.DOTALL)
_PRINTABLE = re.compile(rb"[\x21-\x7e]{1,255}")


def own_methods_of(routes: Iterable[BaseRoute], scope: Scope) -> set[str]:
    """The methods of the routes of this path; empty if it has no route."""
    matching = [route for route in routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    return {method for route in matching for method in route.methods or ()}


def methods_of(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """The methods that this path takes, with OPTIONS and HEAD; empty if it has no route."""
    methods = own_methods_of(routes, scope)
    return sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set())) if methods else []


class Front:
    """ASGI middleware, the first to run: removes the path prefix, turns HEAD into GET, and adds headers to answers.

    A proxy may pass a path on with the prefix `root_path`, under which it publishes the gateway, or without it. While
    the gateway ends (`drain`), answers close their connections, so that the next request goes to another gateway. A
    request line with a whole URL gets a plain path and that URL's host. Redirects lose scheme and host, and get the
    prefix.
    """

    def __init__(self, app: ASGIApp, root_path: str, drain: Drain) -> None:
        self._app, self._root_path, self._drain = app, root_path.rstrip("/"), drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        scope = _origin_form(scope)
        path, prefix = scope["path"], self._root_path
        if prefix and (path == prefix or path.startswith(f"{prefix}/")):
            scope = {**scope, "path": path.removeprefix(prefix) or "/"}
        if scope["type"] == "http" and scope["method"] == "HEAD":  # the server leaves out the body of its answer
            scope = {**scope, "method": "GET", IS_HEAD: True}
        own = [value for name, value in scope["headers"] if name == REQUEST_ID]
        repeated = [(CLIENT_REQUEST_ID, own[0])] if len(own) == 1 and _PRINTABLE.fullmatch(own[0]) else []

        def change(headers: Headers, status: int) -> Headers:
            if 300 <= status < 400:
                headers = [(n, _below(prefix, v) if n == b"location" else v) for n, v in headers]
            if self._drain.has_begun:  # also if the answer's request came before
                headers = [header for header in headers if header[0].lower() != CLOSE[0]]
                return [*headers, *repeated, CLOSE]
            return [*headers, *repeated]

        await self._app(scope, receive, with_headers(send, change))


class OptionsResponder:
    """ASGI middleware that answers OPTIONS with the methods of a path, without a key.

    Browsers' preflights do not get here: `Origins` answers them.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app, self._routes = app, list(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        methods = methods_of(self._routes, scope) if scope["type"] == "http" and scope["method"] == "OPTIONS" else []
        if not methods:
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 204, "headers": [(b"allow", ", ".join(methods).encode())]})
        await send({"type": "http.response.body", "body": b""})


def with_headers(send: Send, change: Callable[[Headers, int], Headers]) -> Send:
    """Returns a `send` that gives an answer the headers that `change` makes of its own and of its status."""

    async def sends(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": change(list(message.get("headers", ())), message["status"])}
        await send(message)

    return sends


def _below(prefix: str, location: bytes) -> bytes:
    """Path and query of a redirect's `location`, with `prefix` before the path unless it is there.

    Routes redirect a path with a slash too many; only a proxy knows under which scheme and host the client sees it.
    """
    parts = urlsplit(location.decode("latin-1"))
    path = prefix + (parts.path.removeprefix(prefix) if parts.path.startswith(f"{prefix}/") else parts.path)
    return (path + (f"?{parts.query}" if parts.query else "")).encode("latin-1")


def _origin_form(scope: Scope) -> Scope:
    """`scope` with a plain path, if the request line has a whole URL as for a proxy; its host replaces the header."""
    match = _SCHEME.fullmatch(scope["path"])
    if match is None:
        return scope
    host = match[1].rpartition("@")[2].encode("latin-1", "replace")
    headers = [header for header in scope["headers"] if header[0] != b"host"]
    return {**scope, "path": match[2] or "/", "headers": [(b"host", host), *headers]}
