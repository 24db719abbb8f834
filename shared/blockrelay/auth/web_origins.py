"""Checks which web pages may use a gateway (`Origin`) and which host names it answers to (`Host`). Pure."""

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from blockrelay.auth.api_keys import is_open_to_others
from blockrelay.errors import ForeignOrigin, UnknownHost, UsageError
from blockrelay.settings import GatewaySettings

_PORTS = {"http": "80", "https": "443"}
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\],]+)(?::([0-9]{1,5}))?")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(?::([0-9]*))?")


@dataclass(frozen=True, slots=True)
class Rules:
    """The origins and host names that a gateway accepts."""

    origins: frozenset[str] = frozenset()  # of other sites whose pages may use the gateway
    any_origin: bool = False  # pages of all sites may
    names: frozenset[str] | None = None  # that `Host` may have, beside IP addresses and localhost; None: any

    @classmethod
    def of(cls, settings: GatewaySettings) -> "Rules":
        """Returns the rules of the settings.

        `Host` is checked if the settings list names, or if the gateway listens on a loopback address; `*` among the
        names turns that off. Raises UsageError, which names the setting, for a wrong origin or name, and for the origin
        `*` without API keys.
        """
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
        """Raises UnknownHost unless there is no `Host` header, or one with an IP address or an accepted name.

        `hosts` has the values of all `Host` headers of a request. localhost and an empty name are accepted too. If
        `names` is None, nothing is checked.
        """
        if self.names is None or not hosts:
            return
        match = _HOST.fullmatch(hosts[0].strip()) if len(hosts) == 1 else None
        if match is None or not (_is_address(match[1]) or _plain(match[1]) in self.names | {"localhost", ""}):
            raise UnknownHost(
                f"this gateway does not answer to {hosts[0][:100]!r}; --allowed-hosts (BLOCKRELAY_ALLOWED_HOSTS) "
                "lists the names that it answers to"
            )

    def check_origin(self, origins: list[str], hosts: list[str], forwarded: Sequence[str] = ()) -> str | None:
        """Returns the `Origin` if the rules list it or allow any; None without one, and for the gateway's own pages.

        With `any_origin` the gateway's own origin is returned too. The arguments have the values of all headers of a
        request: `Origin`, `Host` and `X-Forwarded-Host`. The last one is the host that a proxy got. It counts as the
        gateway's own, like `Host`: a page of another site cannot send `X-Forwarded-Host` before it is accepted. Raises
        ForeignOrigin for any other origin, for several, and for one that is no URL, such as `null`, even with
        `any_origin`.
        """
        if not origins:
            return None
        if len(origins) == 1 and (origin := _ORIGIN.fullmatch(origins[0].lower())):
            if origins[0].lower() in self.origins or self.any_origin:
                return origins[0]
            default = _PORTS.get(origin[1])
            for names in (hosts, forwarded):
                ours = _HOST.fullmatch(names[0].strip().lower()) if default and len(names) == 1 else None
                if ours and (origin[2], origin[3] or default) == (ours[1], ours[2] or default):
                    return None
        raise ForeignOrigin(
            f"pages of {', '.join(origins)[:100]!r} may not use this gateway; --cors-origins (BLOCKRELAY_CORS_ORIGINS) "
            "lists the origins that may"
        )


def _plain(name: str) -> str:
    """Returns a host name in the form for comparing: lower case, without a final dot."""
    return name.lower().removesuffix(".")


def _without_default_port(origin: str) -> str:
    """Returns an origin as browsers write it."""
    scheme = origin.partition(":")[0]
    return origin.removesuffix(f":{_PORTS[scheme]}") if scheme in _PORTS else origin


def _is_address(host: str) -> bool:
    """Returns whether `host` is an IP address, also in the short forms that browsers and curl take (127.1)."""
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
