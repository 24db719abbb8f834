"""Authenticates clients: turns the header `Authorization: Bearer` into a Tenant before the body is read.

Without a file of API keys every client is the tenant without a name. With one, every path but the open ones needs one
of its keys. Neither keys nor their hashes are ever logged, nor put into an answer.
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

#: Paths for load balancers and Prometheus, which may use any host name.
PROBES = frozenset({"/livez", "/readyz", "/health", "/v1/health", "/ping", "/metrics"})
#: Paths that need no key; none of them tells about requests.
_OPEN_PATHS = PROBES | {"/", "/version", "/openapi.json"}

_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})


def is_open(scope: Scope) -> bool:
    """True for a request that needs no API key and counts for no connection limit.

    A WebSocket is never open: at `/` it is that of /v1/infer. Neither is a method that may have a body, because the
    gateway would wait for the body.
    """
    return scope["type"] == "http" and scope["path"] in _OPEN_PATHS and scope["method"] in _WITHOUT_BODY


class KeyRing:
    """The API keys of the file, which is read again after each change: at the next request, or at the next `look`."""

    def __init__(self, path: Path | None) -> None:
        """Reads the file; None: keys are off. Raises UsageError for a file that cannot be used."""
        self._path = path
        self._stamp = path and file_stamp(path)
        self._keys: tuple[StoredKey, ...] = read_keys(path) if path else ()
        #: Time (Unix seconds) at which the keys in force were read; 0 if keys are off.
        self.read_at = time.time() if path else 0.0
        #: True while the file has changed and cannot be used.
        self.unreadable = False

    def __len__(self) -> int:
        """Number of keys in force."""
        return len(self._keys)

    @property
    def names(self) -> list[str]:
        """Names of all tenants; only the empty name if keys are off."""
        return [key.tenant.name for key in self._keys] if self._path else [ANYBODY.name]

    def tenant(self, header: str | None) -> Tenant:
        """The tenant whose key is in this Authorization header. Raises Unauthorized for a missing or unknown key."""
        if self._path is None:
            return ANYBODY
        self.look()
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("this gateway needs an API key: send the header Authorization: Bearer KEY")
        if tenant := find(self._keys, key.strip()):
            return tenant
        raise Unauthorized("the API key is not known here")

    def look(self) -> None:
        """Reads the file again if it has changed. While it cannot be used (half-written or gone), the old keys stay."""
        if self._path is None or (stamp := file_stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read_keys(self._path)
        except UsageError as error:
            self.unreadable = True
            advice = "the keys read before stay in force until the file is corrected"
            logs.get().error("API_KEYS_UNREADABLE", error=str(error), keys=len(self._keys), advice=advice)
        else:
            self.read_at, self.unreadable = time.time(), False
            logs.get().info("API_KEYS_READ", keys=len(self._keys))


class Authentication:
    """ASGI middleware that puts the tenant into the scope's state, or answers 401 without reading the body."""

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
            # A socket or a stream may outlive its key, so it can look the key up again.
            again = partial(self._ring.tenant, _authorization(scope))
            scope.setdefault("state", {}).update(tenant=tenant, current_tenant=again)
        await self._app(scope, receive, send)


def of(connection: Request | WebSocket) -> Tenant:
    """The tenant of a request, or of a socket's handshake; at a path that needs no key, the one without a name.

    `Authentication` must have put it into the scope before.
    """
    tenant = connection.scope["state"]["tenant"]
    assert isinstance(tenant, Tenant)
    return tenant


def current_tenant(connection: Request | WebSocket) -> Tenant:
    """The tenant of a request or socket as the file of keys has it now, with its current limits.

    Raises Unauthorized if the key has been removed since, and at an open path if the client sent no known key.
    """
    return cast(Callable[[], Tenant], connection.scope["state"]["current_tenant"])()


def _authorization(scope: Scope) -> str | None:
    """The value of the Authorization header; None unless there is exactly one."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    return values[0].decode("latin-1") if len(values) == 1 else None
