"""Refuses unknown paths, wrong methods and compressed bodies before the body is read, or asked for (`100 Continue`)."""

import re
from collections.abc import Iterable, Iterator

from starlette.routing import BaseRoute, Match, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from blockrelay.errors import BlockrelayError, NotFound, UnsupportedEncoding
from blockrelay_gateway.http.errors import ErrorResponder, wrong_method
from blockrelay_gateway.http.front import methods_of, own_methods_of


class Targets:
    """ASGI middleware that answers 404 for unknown paths (with a suggestion), 405 for methods, 415 for compression."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute], responder: ErrorResponder) -> None:
        """`routes` are all routes of the application."""
        self._app, self._routes, self._responder = app, list(routes), responder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (allowed := self._other_methods(scope)):
            await wrong_method(scope["path"], scope["method"], allowed)(scope, receive, send)
            return
        error = None
        if scope["type"] == "http":
            error = self._obstacle(scope)
        elif scope["type"] == "websocket":
            error = self._no_socket(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await self._responder.refuse(error, scope, receive, send)

    def _other_methods(self, scope: Scope) -> list[str]:
        """The methods that the path takes instead; empty if the method is right or the path unknown."""
        methods = own_methods_of(self._routes, scope)
        return [] if scope["method"] in methods else sorted(methods)

    def _no_socket(self, scope: Scope) -> BlockrelayError | None:
        """NotFound, with the path of the WebSocket, for a path that has none; else None."""
        sockets = [route for route in self._routes if isinstance(route, WebSocketRoute)]
        if any(route.matches(scope)[0] is not Match.NONE for route in sockets):
            return None
        there = max((route.path for route in sockets), key=len)
        return NotFound(f"there is no WebSocket at {scope['path']}: did you mean {there}?")

    def _obstacle(self, scope: Scope) -> BlockrelayError | None:
        """NotFound for an unknown path, UnsupportedEncoding for a compressed body, else None."""
        path: str = scope["path"]
        # The routes redirect a path with a slash too many or too few at its end.
        if not any(self._is_there(scope, form) for form in (path, path.rstrip("/"), f"{path}/")):
            meant = next((form for form in _meant(path) if self._is_there(scope, form)), None)
            hint = "" if meant is None else f": did you mean {meant}? A base URL of this gateway ends in /v1, once"
            return NotFound(f"there is no {scope['method']} {path}{hint}")
        encodings = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-encoding"]
        encoding = ", ".join(encodings).strip().lower()
        if encoding in ("", "identity"):
            return None
        return UnsupportedEncoding(f"bodies are not decompressed here: send it without Content-Encoding: {encoding}")

    def _is_there(self, scope: Scope, path: str) -> bool:
        return bool(methods_of(self._routes, {**scope, "path": path}))


def _meant(path: str) -> Iterator[str]:
    """Yields the paths that a client with a wrong base URL may mean."""
    plain = re.sub(r"/{2,}", "/", path).rstrip("/")
    below = re.sub(r"^(/v1)+(?=/|$)", "", plain)
    yield from (plain, f"/v1{below}", below or "/")
