"""Connections to Redis and their pools: to one server, or to the server that a looked-up address has right now.

A looked-up connection knows the generation of the place that it is connected to (`discovery`). After an error that
casts doubt on the place, the next connection looks it up again. After an error that shows that the server has another
role, all connections of that generation are outdated, and are closed before the next command. No command is repeated.
"""

import asyncio
import builtins
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import redis
import redis.asyncio
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import SSLConnection
from redis.driver_info import DriverInfo
from redis.retry import Retry

from blockrelay.auth.redis_credentials import take_password_file
from blockrelay.bounded_file import file_stamp
from blockrelay.errors import RedisUnavailable, UsageError
from blockrelay.redis.address import parse_address, unusable
from blockrelay.redis.discovery import AsyncLookup, Lookup
from blockrelay.redis.errors import RedisError, TimedOut, Unreachable, casts_doubt

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w{1,40})'")
#: Beginnings of redis-py's error messages that quote nothing but names of parameters.
_QUOTES_NOTHING = ("Invalid value for ", "it has a password and ")
_SCHEMES = tuple(f"{one}://" for one in ("redis", "rediss", "unix")) + tuple(
    f"{one}+{kind}://" for kind in ("sentinel", "cluster") for one in ("redis", "rediss")
)


#: The client's name and version for the server (CLIENT SETINFO). Without it redis-py would create one for each
#: connection, and read its package's metadata for the version.
_DRIVER = DriverInfo()


class Interruptible:
    """An asyncio connection on which a task that sends can be cancelled at any moment.

    redis-py bounds a write with `asyncio.wait_for`, which on Python 3.11 swallows a cancellation that arrives while the
    write completes. A cancelled task would never end.
    """

    socket_timeout: float | None

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Sends a packed command. Raises TimedOut if that takes longer than `socket_timeout` seconds."""
        patience, self.socket_timeout = self.socket_timeout, None  # so that the parent sets no limit of its own
        try:
            async with asyncio.timeout(patience):
                await cast(Any, super()).send_packed_command(command, check_health)
        except builtins.TimeoutError:
            raise TimedOut("Timeout writing to socket") from None
        finally:
            self.socket_timeout = patience


class FreshCertificates(AsyncSSLConnection):
    """An asyncio TLS connection that reads its certificate files again when it connects and they have changed.

    redis-py's connection for threads reads them each time. Its asyncio connection reads them only once per pool.
    """

    _read: tuple[object, ...] | None = None

    def _connection_arguments(self) -> Any:
        context = self.ssl_context
        files = (context.ca_certs, context.certfile, context.keyfile)
        stamps = tuple(file_stamp(Path(file)) for file in files if file)
        if stamps != self._read:
            context.context, self._read = None, stamps
        return super()._connection_arguments()


def interruptible(kind: Any) -> Any:
    """Returns an `Interruptible` subclass of `kind`, a class of asyncio connections (TCP, TLS or unix socket)."""
    kind = FreshCertificates if kind is AsyncSSLConnection else kind
    return type(kind.__name__, (Interruptible, kind), {})


class LookedUpConnection(redis.Connection):
    """A connection to the server that `lookup` returns at the moment of connecting."""

    def __init__(self, *, lookup: Lookup, **options: Any) -> None:
        self.lookup, self.generation = lookup, -1
        super().__init__(**options)

    def renew(self) -> None:
        """Closes the connection if it may be to a wrong server; call it before each command. Sending connects again."""
        if self.is_connected and not self.lookup.confirms(self.generation):
            self.disconnect()

    def connect(self) -> None:
        self.renew()
        super().connect()

    def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        if self.is_connected:
            return
        place, self.generation = self.lookup.find()
        self.host, self.port = place.host, place.port
        try:
            super().connect_check_health(check_health, retry_socket_connect)
        except (RedisError, OSError) as error:
            _judge(self, error)
            raise

    def on_connect_check_health(self, check_health: bool = True) -> None:
        super().on_connect_check_health(check_health)
        if self.lookup.names_masters:
            self.send_command("ROLE", check_health=False)
            _must_be_master(self, self.read_response())

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        try:
            super().send_packed_command(command, check_health)
        except (RedisError, OSError) as error:
            _judge(self, error)
            raise

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except (RedisError, OSError) as error:
            _judge(self, error)
            raise


class _LookedUpTlsConnection(LookedUpConnection, SSLConnection):
    pass


class AsyncLookedUpConnection(Interruptible, redis.asyncio.Connection):
    """An asyncio connection to the server that `lookup` returns at the moment of connecting."""

    def __init__(self, *, lookup: AsyncLookup, **options: Any) -> None:
        self.lookup, self.generation = lookup, -1
        super().__init__(**options)

    async def renew(self) -> None:
        """Closes the connection if it may be to a wrong server; call it before each command. Sending connects again."""
        if self.is_connected and not await self.lookup.confirms(self.generation):
            await self.disconnect(nowait=True)

    async def connect(self) -> None:
        await self.renew()
        await super().connect()

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        if self.is_connected:
            return
        place, self.generation = await self.lookup.find()
        self.host, self.port = place.host, place.port
        try:
            await super().connect_check_health(check_health, retry_socket_connect)
        except (RedisError, OSError) as error:
            _judge(self, error)
            raise

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        await super().on_connect_check_health(check_health)
        if self.lookup.names_masters:
            await self.send_command("ROLE", check_health=False)
            _must_be_master(self, await self.read_response())

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        try:
            await super().send_packed_command(command, check_health)
        except (RedisError, OSError) as error:
            _judge(self, error)
            raise

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except (RedisError, OSError) as error:
            _judge(self, error)
            raise


class _AsyncLookedUpTlsConnection(AsyncLookedUpConnection, FreshCertificates):
    pass


_LookedUp = LookedUpConnection | AsyncLookedUpConnection


def _judge(connection: _LookedUp, error: Exception) -> None:
    if verdict := casts_doubt(error):
        connection.lookup.doubt(connection.generation, demoted=verdict == "demoted")


def _must_be_master(connection: _LookedUp, answer: Any) -> None:
    """Raises Unreachable unless `answer`, to ROLE, is that of a master: writes to any other server would be lost."""
    role = answer[0].decode() if isinstance(answer[0], bytes) else answer[0]
    if role != "master":
        connection.lookup.doubt(connection.generation, demoted=True)
        raise Unreachable(f"{connection.host}:{connection.port} is no master ({role}): there is a failover")


def must_hold(connection: redis.Connection) -> None:
    """Checks a kept connection before its next use. Raises RedisUnavailable if it may be to a wrong server.

    It then closes the connection; sending connects to the right server. The caller must know of the change, since a log
    may be shorter there, or messages were missed.
    """
    if isinstance(connection, LookedUpConnection) and connection.is_connected:
        connection.renew()
        _must_be_connected(connection)


async def must_hold_async(connection: redis.asyncio.Connection) -> None:
    """Does what `must_hold` does, for an asyncio connection."""
    if isinstance(connection, AsyncLookedUpConnection) and connection.is_connected:
        await connection.renew()
        _must_be_connected(connection)


def _must_be_connected(connection: _LookedUp) -> None:
    if not connection.is_connected:
        raise RedisUnavailable("Redis does not answer: it may be another server by now")


def make_pool(url: str, cell: str | None, options: Mapping[str, Any]) -> redis.ConnectionPool:
    """Returns a pool of connections for threads, none of them connected yet.

    `options`: those of redis-py's `from_url`. `cell`: the cell that it is for, needed for a cluster. Raises UsageError
    for a URL that cannot be used, and ValueError for a cluster's without `cell`.
    """
    address = parse_address(url)
    options = {**options, "driver_info": _DRIVER, "retry": Retry(NoBackoff(), 0)}
    server = url if address is None else address.server_url(address.seeds[0])
    if address is not None:
        options["lookup"] = Lookup(address, cell, options)
    try:
        pool = redis.ConnectionPool.from_url(server, **options)
        take_password_file(pool.connection_kwargs)
        if address is not None:
            tls = issubclass(pool.connection_class, SSLConnection)
            pool.connection_class = _LookedUpTlsConnection if tls else LookedUpConnection
        pool.connection_class(**pool.connection_kwargs)  # not connected: says what is wrong with the parameters
    except (TypeError, ValueError, RedisError) as error:
        raise _explained(url, error) from None
    return pool


def server_certificate_end(client: redis.Redis) -> float | None:
    """Returns when the certificate of the client's server ends (Unix seconds).

    It is that of the connection that was used last. None without TLS, while no connection is idle, and where the
    server's certificate is not checked.
    """
    idle = list(cast(Any, client.connection_pool)._available_connections)  # the last one is taken next
    sock = getattr(idle[-1], "_sock", None) if idle else None
    if not isinstance(sock, ssl.SSLSocket):
        return None
    try:
        certificate = sock.getpeercert() or {}
    except (OSError, ValueError):  # it is being closed
        return None
    end = certificate.get("notAfter")
    return float(ssl.cert_time_to_seconds(str(end))) if end else None


class AsyncPool(redis.asyncio.BlockingConnectionPool):
    """A pool of asyncio connections; a task waits for one when all are in use."""

    cell: str | None = None  # the cell that it is for, named in errors


def make_async_pool(url: str, cell: str | None, options: Mapping[str, Any], *, connections: int) -> AsyncPool:
    """Returns a pool of at most `connections` asyncio connections. Other parameters and errors as for `make_pool`."""
    address = parse_address(url)
    options = {**options, "driver_info": _DRIVER, "retry": AsyncRetry(NoBackoff(), 0)}
    server = url if address is None else address.server_url(address.seeds[0])
    if address is not None:
        options["lookup"] = AsyncLookup(address, cell, options, interruptible)
    try:
        pool = AsyncPool.from_url(server, max_connections=connections, **options)
        take_password_file(pool.connection_kwargs)
        pool.cell = cell
        if address is None:
            pool.connection_class = interruptible(pool.connection_class)
        else:
            tls = issubclass(pool.connection_class, AsyncSSLConnection)
            pool.connection_class = _AsyncLookedUpTlsConnection if tls else AsyncLookedUpConnection
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError, RedisError) as error:
        raise _explained(url, error) from None
    return pool


def checked_url(url: str) -> str:
    """Returns `url`. Raises UsageError if it is not the URL of a Redis."""
    make_pool(url, "any", {})
    return url


def _explained(url: str, error: Exception) -> UsageError:
    if not url.startswith(_SCHEMES):
        return unusable(url, f"it begins with none of {' '.join(_SCHEMES)}")
    if unexpected := _UNEXPECTED.search(str(error)):
        return unusable(url, f"it has the unknown parameter {unexpected[1]!r}")
    text = str(error)
    return unusable(url, text if text.startswith(_QUOTES_NOTHING) else "its host, port or a parameter cannot be read")
