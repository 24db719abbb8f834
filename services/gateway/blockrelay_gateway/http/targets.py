"""What a request asks for, looked at before its body: what is refused here is neither read nor asked for by 100."""

import re
from collections.abc import Iterable, Iterator

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from blockrelay.errors import BlockrelayError, NotFound, UnsupportedEncoding
from blockrelay_gateway.http.errors import ErrorResponder
from blockrelay_gateway.http.front import methods_of


class Targets:
    """Plain ASGI: 404 for paths that are not there, with the one that may be meant, and 415 for compressed bodies."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute], responder: ErrorResponder) -> None:
        """`routes`: all that there are."""
        self._app, self._routes, self._responder = app, list(routes), responder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._obstacle(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await self._responder.refuse(error, scope, receive, send)

    def _obstacle(self, scope: Scope) -> BlockrelayError | None:
        path: str = scope["path"]
        # Without its last slash, or with one, a path is redirected by the routes.
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
    """Paths that clients with a wrong base URL make of others."""
    plain = re.sub(r"/{2,}", "/", path).rstrip("/")
    below = re.sub(r"^(/v1)+(?=/|$)", "", plain)
    yield from (plain, f"/v1{below}", below or "/")
