"""Parses Redis URLs: of one server, of a master that Sentinels name, and of a cluster.

    redis:// rediss:// unix://                                     one server, as redis-py reads them
    redis+sentinel://[USER:PASSWORD@]HOST[:26379],.../NAME[/DB]    the master that Sentinels name
    redis+cluster://[USER:PASSWORD@]HOST[:6379],.../0              the node of a cluster that has the keys of the cell

The last two are looked-up addresses: the server is found by asking Sentinels or nodes. `rediss+sentinel` and
`rediss+cluster` are the same over TLS. Instead of a password a URL may have the parameter `password_file`, and for its
Sentinels `sentinel_password_file` (`blockrelay.auth.password_file`). This module connects to nothing, and its errors
never contain a user, a password or the value of a parameter.
"""

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from blockrelay.auth.password_file import PARAMETER
from blockrelay.errors import UsageError

_LOOKED_UP = re.compile(r"(rediss?)\+(sentinel|cluster)://")
_PORTS = {"sentinel": 26379, "cluster": 6379}
#: Names of masters that Sentinel's configuration allows.
_NAME = re.compile(r"[A-Za-z0-9._-]+")
#: Parameters for the servers only: Sentinels have users and passwords of their own, and no databases.
_NOT_FOR_SENTINELS = {"username", "password", PARAMETER}
#: Parameters for the Sentinels only.
_OF_SENTINELS = {"sentinel_username", "sentinel_password", f"sentinel_{PARAMETER}"}


@dataclass(frozen=True, slots=True)
class RedisNode:
    """Host and port of one Redis server or Sentinel."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class LookedUpAddress:
    """A URL whose server must be looked up, by asking Sentinels or the nodes of a cluster."""

    kind: Literal["sentinel", "cluster"]
    seeds: tuple[RedisNode, ...]  # Sentinels or cluster nodes to ask first
    name: str  # of the master; "" for a cluster
    _scheme: str
    _database: str
    _user: str = field(repr=False)  # USER:PASSWORD, or ""
    _parameters: tuple[tuple[str, str], ...] = field(repr=False)

    def server_url(self, node: RedisNode) -> str:
        """Returns the URL of the Redis server `node`, as redis-py reads it."""
        user = f"{self._user}@" if self._user else ""
        own = [(name, value) for name, value in self._parameters if not name.startswith("sentinel_")]
        return f"{self._scheme}://{user}{node}/{self._database}?{urlencode(own)}"

    def seed_url(self, node: RedisNode) -> str:
        """Returns the URL of `node`, a Sentinel or cluster node that is asked for the server."""
        if self.kind == "cluster":
            return self.server_url(node)
        parameters = dict(self._parameters)
        user, password = parameters.get("sentinel_username", ""), parameters.get("sentinel_password", "")
        who = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
        shared = {n: v for n, v in parameters.items() if not n.startswith("sentinel_") and n not in _NOT_FOR_SENTINELS}
        if file := parameters.get(f"sentinel_{PARAMETER}"):
            shared[PARAMETER] = file
        return f"{self._scheme}://{who}{node}/?{urlencode(shared)}"


class _Unusable(ValueError):
    """A part of a URL is wrong; the message does not quote the URL."""


def shown(url: str) -> str:
    """Returns `url` for use in a message: without user, password and parameters."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    if _ambiguous(rest):
        return f"{scheme}{separator}..."
    return f"{scheme}{separator}{re.split('[?#]', rest[rest.rfind('@') + 1 :])[0]}"


def unusable(url: str, why: str) -> UsageError:
    """Returns the one-line error for `url`. `why` may quote names of parameters, but nothing else of the URL."""
    if _ambiguous(url):
        why = "write @, : / ? and # in a password or a parameter as %40, %3A, %2F, %3F and %23"
    return UsageError(f"{shown(url)!r} is not the URL of a Redis: {why}")


def _ambiguous(url: str) -> bool:
    """Returns whether an @ follows a ?: the text before it may be a password or a parameter."""
    return -1 < url.find("?") < url.rfind("@")


def parse_address(url: str) -> LookedUpAddress | None:
    """Parses a looked-up address; returns None for the URL of one server, which redis-py reads.

    Raises UsageError for a looked-up address with a wrong part.
    """
    match = _LOOKED_UP.match(url)
    if match is None:
        return None
    try:
        return _parse(url, match[1], "sentinel" if match[2] == "sentinel" else "cluster")
    except _Unusable as error:
        raise unusable(url, str(error)) from None
    except ValueError:  # its text quotes the URL
        raise unusable(url, "its hosts cannot be read") from None


def _parse(url: str, scheme: str, kind: Literal["sentinel", "cluster"]) -> LookedUpAddress:
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    seeds = tuple(_node(host, _PORTS[kind]) for host in hosts.split(","))
    name, database = _name_and_database(kind, parts.path)
    parameters = parse_qsl(parts.query)
    database = dict(parameters).get("db", database)
    if not (database.isdecimal() and database.isascii()):
        raise _Unusable("its database is not a number")
    if kind == "cluster" and int(database):
        raise _Unusable("a cluster has no database but 0")
    for parameter, _ in parameters:
        if parameter.startswith("sentinel_") and (kind == "cluster" or parameter not in _OF_SENTINELS):
            raise _Unusable(f"it has the unknown parameter {parameter!r}")
    rest = tuple((parameter, value) for parameter, value in parameters if parameter != "db")
    return LookedUpAddress(kind, seeds, name, scheme, database, user, rest)


def _node(text: str, port: int) -> RedisNode:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path or parts.query:
        raise _Unusable("a host is missing")
    try:
        port = port if parts.port is None else parts.port
    except ValueError:
        port = 0
    if not port > 0:
        raise _Unusable("a port is not a number from 1 to 65535")
    return RedisNode(parts.hostname, port)


def _name_and_database(kind: Literal["sentinel", "cluster"], path: str) -> tuple[str, str]:
    segments = path.removeprefix("/").removesuffix("/").split("/")
    if kind == "cluster":
        if len(segments) > 1:
            raise _Unusable("behind its hosts comes /0")
        return "", segments[0] or "0"
    if not segments[0]:
        raise _Unusable("behind the Sentinels comes /NAME, the name that they know the master by")
    if not _NAME.fullmatch(segments[0]) or len(segments) > 2:
        raise _Unusable("behind the Sentinels comes /NAME or /NAME/DATABASE, a name of letters, digits and . _ -")
    return segments[0], segments[1] if len(segments) > 1 else "0"
