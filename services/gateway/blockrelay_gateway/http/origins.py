"""Web pages and names: which origins may use this gateway (`Origin`, CORS), and which names it answers to (`Host`).

A web page can send requests and open WebSockets to every address that its visitor's browser reaches, 127.0.0.1
included, and a page whose own name was made to point here (DNS rebinding) can read the answers too. Browsers tell on
both, in headers that a page cannot set; other clients send no `Origin`, and are not concerned.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockrelay.auth.api_keys import is_open_to_others
from blockrelay.errors import ForeignOrigin, UnknownHost, UsageError
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.http.authentication import PROBES
from blockrelay_gateway.http.errors import ErrorResponder

_PORTS = {"http": "80", "https": "443"}
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\],]+)(?::([0-9]{1,5}))?")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(?::([0-9]*))?")
#: Seconds that a browser need not ask again; answer headers that a page may read.
PREFLIGHT_S, EXPOSED = 600, b"x-request-id, retry-after, idempotent-replayed"


@dataclass(frozen=True, slots=True)
class Rules:
    """`origins` are those of other sites whose pages may use the gateway, `any_origin` lets all in; `names` are those
    that `Host` may say, None: any. Addresses and localhost always pass."""

    origins: frozenset[str] = frozenset()
    any_origin: bool = False
    names: frozenset[str] | None = None

    @classmethod
    def of(cls, settings: GatewaySettings) -> "Rules":
        """Raises UsageError, naming the setting, for what is neither an origin nor a name."""
        origins = {origin.strip().lower().rstrip("/") for origin in settings.cors_origins.split(",")} - {""}
        if "*" in origins and settings.api_keys is None:
            raise UsageError("BLOCKRELAY_CORS_ORIGINS: * lets every web page in; it needs BLOCKRELAY_API_KEYS")
        for origin in origins - {"*"}:
            if not _ORIGIN.fullmatch(origin):
                raise UsageError(f"BLOCKRELAY_CORS_ORIGINS: {origin!r} is not an origin like https://chat.example.com")
        names = {_plain(name.strip()) for name in settings.allowed_hosts.split(",")} - {""}
        for name in names:
            if not re.fullmatch(r"[^\s/:@\[\]]+", name):
                raise UsageError(f"BLOCKRELAY_ALLOWED_HOSTS: {name!r} is not a host name without a port")
        checked = "*" not in names and (bool(names) or not is_open_to_others(settings.host))
        return cls(
            origins=frozenset(_without_default_port(origin) for origin in origins - {"*"}),
            any_origin="*" in origins,
            names=frozenset(names | {_plain(settings.host)}) if checked else None,
        )

    def check_host(self, hosts: list[str]) -> None:
        """Raise UnknownHost unless the `Host` headers, none or one, say an address or a name of ours."""
        if self.names is None or not hosts:
            return
        found = _HOST.fullmatch(hosts[0].strip()) if len(hosts) == 1 else None
        if found is None or not (_is_address(found[1]) or _plain(found[1]) in self.names | {"localhost", ""}):
            raise UnknownHost(
                f"this gateway does not answer to {hosts[0][:100]!r}; --allowed-hosts (BLOCKRELAY_ALLOWED_HOSTS) "
                "lists the names that it answers to"
            )

    def check_origin(self, origins: list[str], hosts: list[str]) -> str | None:
        """The origin of another site that may use us, None for our own and for clients that are no browsers.

        Raises ForeignOrigin.
        """
        if not origins:
            return None
        if len(origins) == 1 and (found := _ORIGIN.fullmatch(origins[0].lower())):
            if origins[0].lower() in self.origins or self.any_origin:
                return origins[0]
            if _PORTS.get(found[1]) and len(hosts) == 1 and (ours := _HOST.fullmatch(hosts[0].strip().lower())):
                default = _PORTS[found[1]]
                if (found[2], found[3] or default) == (ours[1], ours[2] or default):
                    return None
        raise ForeignOrigin(
            f"pages of {', '.join(origins)[:100]!r} may not use this gateway; --cors-origins (BLOCKRELAY_CORS_ORIGINS) "
            "lists the origins that may"
        )


class Origins:
    """Plain ASGI, the first to run: refuses by `rules` before a body is read, 403 or 421, and answers for CORS."""

    def __init__(self, app: ASGIApp, rules: Rules, routes: Sequence[BaseRoute], responder: ErrorResponder) -> None:
        """`routes`: all that there are, for preflights."""
        self._app, self._rules, self._responder = app, rules, responder
        self._routes = [route for route in routes if isinstance(route, Route)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        try:
            if scope["path"] not in PROBES:
                self._rules.check_host(hosts)
            guest = self._rules.check_origin(origins, hosts)
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
        """May a page send this method and these headers? It may what the route takes; keys are looked at later."""
        headers = [
            (b"access-control-allow-origin", guest.encode("latin-1")),
            (b"access-control-allow-methods", ", ".join(self._methods(scope)).encode()),
            (b"access-control-max-age", str(PREFLIGHT_S).encode()),
            (b"vary", b"origin, access-control-request-method, access-control-request-headers"),
        ]
        if asked := _values(scope, b"access-control-request-headers"):
            headers.append((b"access-control-allow-headers", ", ".join(asked).encode("latin-1")))
        private = _values(scope, b"access-control-request-private-network") == ["true"]
        if private and guest.lower() in self._rules.origins:
            headers.append((b"access-control-allow-private-network", b"true"))
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _methods(self, scope: Scope) -> list[str]:
        """What the routes of this path take; empty when there is none."""
        matching = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
        return sorted({method for route in matching for method in route.methods or ()})


def _for(guest: str, send: Send) -> Send:
    """`send` that lets a page of `guest` read the answer."""
    ours = [
        (b"access-control-allow-origin", guest.encode("latin-1")),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"origin"),
    ]

    async def readable(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *ours]}
        await send(message)

    return readable


def _values(scope: Scope, header: bytes) -> list[str]:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return [value.decode("latin-1") for name, value in headers if name == header]


def _plain(name: str) -> str:
    """A name as it is compared: `localhost.` is localhost."""
    return name.lower().removesuffix(".")


def _without_default_port(origin: str) -> str:
    """As browsers write it."""
    scheme = origin.partition(":")[0]
    return origin.removesuffix(f":{_PORTS[scheme]}") if scheme in _PORTS else origin


def _is_address(host: str) -> bool:
    """An IP address, also one in the short forms that browsers and curl take (127.1); no DNS name is one."""
    if host.startswith("["):
        try:
            return ipaddress.ip_address(host[1:-1]).version == 6
        except ValueError:
            return False
    try:
        socket.inet_aton(host)
    except (OSError, ValueError):
        return False
    return True
