"""The client's identity: the `Authorization: Bearer` header to a Tenant, before anything else is looked at.

Without a file of keys everybody is the tenant without a name. With one, every path but the open ones needs a key of it.
Neither keys nor their hashes are ever logged, nor put into an answer.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from fastapi import Request, WebSocket
from starlette.types import ASGIApp, Receive, Scope, Send

from blockrelay.auth.api_keys import ANYBODY, StoredKey, Tenant, find, read_keys
from blockrelay.bounded_file import file_stamp
from blockrelay.errors import Unauthorized, UsageError
from blockrelay.observability import logs
from blockrelay_gateway.http.errors import ErrorResponder

#: What a load balancer and Prometheus ask, under any name.
PROBES = frozenset({"/livez", "/readyz", "/health", "/v1/health", "/ping", "/metrics"})
#: Seconds between two looks whether the key of an open socket or an endless stream is still there.
LOOK_S = 2.0
#: That, and what a curious client asks; none of it tells about requests.
_OPEN_PATHS = PROBES | {"/", "/version", "/openapi.json"}

_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})


def is_open(scope: Scope) -> bool:
    """Whether a connection needs neither a key nor room.

    A socket always does: at `/` it is that of /v1/infer. So does what may have a body, which would be waited for.
    """
    return scope["type"] == "http" and scope["path"] in _OPEN_PATHS and scope["method"] in _WITHOUT_BODY


class KeyRing:
    """The keys of the file, which is read again after each change: at the next request, or at the next `look`.

    `read_at`: when those in force were read, in Unix seconds; 0 where keys are off. `unreadable`: what stands in the
    file now cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        """None: keys are off. Raises UsageError for a file that cannot be used."""
        self._path = path
        self._stamp = path and file_stamp(path)
        self._keys: tuple[StoredKey, ...] = read_keys(path) if path else ()
        self.read_at = time.time() if path else 0.0
        self.unreadable = False

    def __len__(self) -> int:
        """How many are in force."""
        return len(self._keys)

    @property
    def names(self) -> list[str]:
        """Of all tenants there are; the nameless one where keys are off."""
        return [key.tenant.name for key in self._keys] if self._path else [ANYBODY.name]

    def tenant(self, header: str | None) -> Tenant:
        """The sender of this Authorization header. Raises Unauthorized."""
        if self._path is None:
            return ANYBODY
        self.look()
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("this gateway needs an API key: send the header Authorization: Bearer KEY")
        if found := find(self._keys, key.strip()):
            return found
        raise Unauthorized("the API key is not known here")

    def look(self) -> None:
        """Read the file if it is another one than before. While it cannot be used (half-written by hand, or gone), the
        keys that we have stay in force."""
        if self._path is None or (stamp := file_stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read_keys(self._path)
        except UsageError as error:
            self.unreadable = True
            advice = "those read before stay in force until the file is mended"
            logs.get().error("API_KEYS_UNREADABLE", error=str(error), keys=len(self._keys), advice=advice)
        else:
            self.read_at, self.unreadable = time.time(), False
            logs.get().info("API_KEYS_READ", keys=len(self._keys))


class Authentication:
    """Plain ASGI: puts the tenant into the scope's state, or answers 401 without reading the body."""

    def __init__(self, app: ASGIApp, ring: KeyRing, responder: ErrorResponder) -> None:
        self._app, self._ring, self._responder = app, ring, responder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            tenant = ANYBODY
            if not is_open(scope):
                try:
                    tenant = self._ring.tenant(_authorization(scope))
                except Unauthorized as error:
                    await self._responder.refuse(error, scope, receive, send)
                    return
            # Kept as a question, too: a socket and a stream outlive what the file of keys said when they were opened.
            again = partial(self._ring.tenant, _authorization(scope))
            scope.setdefault("state", {}).update(tenant=tenant, tenant_again=again)
        await self._app(scope, receive, send)


def of(connection: Request | WebSocket) -> Tenant:
    """The sender of this request, or of the handshake of this socket."""
    tenant = connection.scope["state"]["tenant"]
    assert isinstance(tenant, Tenant)
    return tenant


def asked_again(connection: Request | WebSocket) -> Tenant:
    """The sender by what the file of keys says now, with the limits that it has now.

    Raises Unauthorized when the key of the handshake, or of the request, is not there any more.
    """
    return cast(Callable[[], Tenant], connection.scope["state"]["tenant_again"])()


def _authorization(scope: Scope) -> str | None:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    return values[0].decode("latin-1") if len(values) == 1 else None
