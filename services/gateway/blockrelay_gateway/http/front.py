"""Features that every route has: HEAD, OPTIONS, a path prefix, and the client's own request id."""

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockrelay_gateway.draining.drain import Drain

#: A client may send its own id in the first header; the answer repeats it in the second, and has ours in the first.
REQUEST_ID, CLIENT_REQUEST_ID = b"x-request-id", b"x-client-request-id"
CLOSE = (b"connection", b"close")
#: Set in the scope of a HEAD request, which routes see as a GET: its answer needs no body.
IS_HEAD = "blockrelay.head"
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
    the gateway ends (`drain`), answers close their connections, so that the next request goes to another gateway.
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
        if scope["type"] == "http":
            send = _with_farewell(_with_prefix(send, prefix), self._drain)
        own = [value for name, value in scope["headers"] if name == REQUEST_ID]
        if len(own) == 1 and _PRINTABLE.fullmatch(own[0]):
            send = _with_header(send, CLIENT_REQUEST_ID, own[0])
        await self._app(scope, receive, send)


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


def _with_prefix(send: Send, prefix: str) -> Send:
    """Returns a `send` that makes the target of a redirect a path below `prefix`, without scheme and host.

    Routes redirect a path with a slash too many; only a proxy knows under which scheme and host the client sees it.
    """

    async def sends(message: Message) -> None:
        if message["type"] == "http.response.start" and 300 <= message["status"] < 400:
            headers = [(n, _below(prefix, v) if n == b"location" else v) for n, v in message.get("headers", ())]
            message = {**message, "headers": headers}
        await send(message)

    return sends


def _with_farewell(send: Send, drain: Drain) -> Send:
    """Returns a `send` that adds `Connection: close` to an answer that begins while the gateway ends."""

    async def sends(message: Message) -> None:
        if message["type"] == "http.response.start" and drain.has_begun:
            headers = [header for header in message.get("headers", ()) if header[0].lower() != CLOSE[0]]
            message = {**message, "headers": [*headers, CLOSE]}
        await send(message)

    return sends


def _below(prefix: str, location: bytes) -> bytes:
    """Path and query of `location`, with `prefix` before the path unless it is there."""
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


def _with_header(send: Send, name: bytes, value: bytes) -> Send:
    """Returns a `send` that adds a header to the answer."""

    async def sends(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (name, value)]}
        await send(message)

    return sends
