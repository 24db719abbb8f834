"""What clients and balancers may do with every route: HEAD, OPTIONS, a prefix before it, a request id of theirs."""

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockrelay_gateway.draining.drain import Drain

#: The client's own id comes back in the second, beside ours, which is called as its.
REQUEST_ID, CLIENT_REQUEST_ID = b"x-request-id", b"x-client-request-id"
CLOSE = (b"connection", b"close")
#: Set in the scope of a HEAD request, which routes see as a GET: nobody reads a body.
IS_HEAD = "blockrelay.head"
_SCHEME = re.compile(r"(?i)https?://([^/?#]*)(.*)", re.DOTALL)
_PRINTABLE = re.compile(rb"[\x21-\x7e]{1,255}")


def own_methods_of(routes: Iterable[BaseRoute], scope: Scope) -> set[str]:
    """What the routes of this path are for; empty when there is none."""
    matching = [route for route in routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    return {method for route in matching for method in route.methods or ()}


def methods_of(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """What this path takes, beside its routes from us; empty when there is none."""
    methods = own_methods_of(routes, scope)
    return sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set())) if methods else []


class Front:
    """Plain ASGI, the first to run.

    A proxy may pass a path on with the prefix `root_path` under which it publishes us, or without it. Once the gateway
    was told to end (`drain`), answers close their connections: the next request goes elsewhere.
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
        if scope["type"] == "http" and scope["method"] == "HEAD":  # the server sends no body of it
            scope = {**scope, "method": "GET", IS_HEAD: True}
        if scope["type"] == "http":
            send = _with_farewell(_with_prefix(send, prefix), self._drain)
        own = [value for name, value in scope["headers"] if name == REQUEST_ID]
        if len(own) == 1 and _PRINTABLE.fullmatch(own[0]):
            send = _with_header(send, CLIENT_REQUEST_ID, own[0])
        await self._app(scope, receive, send)


class Options:
    """Plain ASGI: says which methods the routes of a path take, without a key. (Browsers' preflights are answered
    before, by `Origins`.)"""

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
    """A redirect (of a path with a slash too many) leads to a path of the server that the client has asked: what scheme
    and name that has, the proxy knows."""

    async def sends(message: Message) -> None:
        if message["type"] == "http.response.start" and 300 <= message["status"] < 400:
            headers = [(n, _below(prefix, v) if n == b"location" else v) for n, v in message.get("headers", ())]
            message = {**message, "headers": headers}
        await send(message)

    return sends


def _with_farewell(send: Send, drain: Drain) -> Send:
    """The `send` of an answer that closes its connection if it begins while the gateway ends."""

    async def sends(message: Message) -> None:
        if message["type"] == "http.response.start" and drain.begun:
            headers = [header for header in message.get("headers", ()) if header[0].lower() != CLOSE[0]]
            message = {**message, "headers": [*headers, CLOSE]}
        await send(message)

    return sends


def _below(prefix: str, location: bytes) -> bytes:
    parts = urlsplit(location.decode("latin-1"))
    path = prefix + (parts.path.removeprefix(prefix) if parts.path.startswith(f"{prefix}/") else parts.path)
    return (path + (f"?{parts.query}" if parts.query else "")).encode("latin-1")


def _origin_form(scope: Scope) -> Scope:
    """`scope` of a target with scheme and host, as proxies are asked: its path, and its host instead of the header."""
    found = _SCHEME.fullmatch(scope["path"])
    if found is None:
        return scope
    host = found[1].rpartition("@")[2].encode("latin-1", "replace")
    headers = [header for header in scope["headers"] if header[0] != b"host"]
    return {**scope, "path": found[2] or "/", "headers": [(b"host", host), *headers]}


def _with_header(send: Send, name: bytes, value: bytes) -> Send:
    async def sends(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (name, value)]}
        await send(message)

    return sends
