"""Connections to a Redis and their pools: to one server, or to wherever a looked-up address leads right now.

A looked-up connection knows the generation of the place that it is connected to (`discovery`). An error that casts
doubt on the place makes the next connection look again; one that says that the server has another role now makes the
others outdated, and an outdated connection is closed before another command goes over it. No command is repeated here.
"""

import asyncio
import builtins
import re
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
#: Messages of redis-py that quote nothing but names of parameters.
_QUOTES_NOTHING = ("Invalid value for ", "it has a password and ")
_SCHEMES = tuple(f"{one}://" for one in ("redis", "rediss", "unix")) + tuple(
    f"{one}+{kind}://" for kind in ("sentinel", "cluster") for one in ("redis", "rediss")
)


#: What connections say of themselves to the server (CLIENT SETINFO). redis-py would make one for each connection, and
#: read its package's metadata for the version.
_DRIVER = DriverInfo()


class Interruptible:
    """A connection on which a task that sends can be cancelled at any moment.

    redis-py bounds a write with `asyncio.wait_for`, which on Python 3.11 swallows a cancellation that arrives while the
    write completes. A cancelled task would never end.
    """

    socket_timeout: float | None

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        patience, self.socket_timeout = self.socket_timeout, None  # the parent then waits without a limit of its own
        try:
            async with asyncio.timeout(patience):
                await cast(Any, super()).send_packed_command(command, check_health)
        except builtins.TimeoutError:
            raise TimedOut("Timeout writing to socket") from None
        finally:
            self.socket_timeout = patience


class FreshCertificates(AsyncSSLConnection):
    """A TLS connection that reads its files of certificates again when it connects and they have changed.

    redis-py's for threads reads them each time; its for tasks keeps what it has read once, for as long as its pool.
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
    """The same kind of asyncio connection (TCP, TLS or unix socket: the URL says), interruptible."""
    kind = FreshCertificates if kind is AsyncSSLConnection else kind
    return type(kind.__name__, (Interruptible, kind), {})


class LookedUpConnection(redis.Connection):
    """To where `lookup` leads at the moment that it connects."""

    def __init__(self, *, lookup: Lookup, **options: Any) -> None:
        self.lookup, self.generation = lookup, -1
        super().__init__(**options)

    def renew(self) -> None:
        """Before the next command: close it, unless it is known to be connected to the right server. It connects when
        something is sent."""
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
    """As `LookedUpConnection`."""

    def __init__(self, *, lookup: AsyncLookup, **options: Any) -> None:
        self.lookup, self.generation = lookup, -1
        super().__init__(**options)

    async def renew(self) -> None:
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
    """`answer` to ROLE. What is written into a server that is a replica soon, or was the master before, is lost."""
    role = answer[0].decode() if isinstance(answer[0], bytes) else answer[0]
    if role != "master":
        connection.lookup.doubt(connection.generation, demoted=True)
        raise Unreachable(f"{connection.host}:{connection.port} is no master ({role}): there is a failover")


def must_hold(connection: redis.Connection) -> None:
    """Before the next use of a connection that is kept. If its server may not be the Redis of its address any more, it
    is closed, to connect anew when something is sent, and RedisUnavailable is raised: who keeps one has to hear of that
    (a log may be shorter there, messages were missed)."""
    if isinstance(connection, LookedUpConnection) and connection.is_connected:
        connection.renew()
        _must_be_connected(connection)


async def must_hold_async(connection: redis.asyncio.Connection) -> None:
    """As `must_hold`."""
    if isinstance(connection, AsyncLookedUpConnection) and connection.is_connected:
        await connection.renew()
        _must_be_connected(connection)


def _must_be_connected(connection: _LookedUp) -> None:
    if not connection.is_connected:
        raise RedisUnavailable("Redis does not answer: it may be another server by now")


def make_pool(url: str, cell: str | None, options: Mapping[str, Any]) -> redis.ConnectionPool:
    """Connections for threads. `options` as redis-py's `from_url` has them. Raises UsageError for an unusable URL."""
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


class AsyncPool(redis.asyncio.BlockingConnectionPool):
    """`cell`: which one it is for."""

    cell: str | None = None


def make_async_pool(url: str, cell: str | None, options: Mapping[str, Any], *, connections: int) -> AsyncPool:
    """As `make_pool`, for tasks; who finds all `connections` in use waits for one."""
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
    """`url`, or UsageError when it names no Redis."""
    make_pool(url, "any", {})
    return url


def _explained(url: str, error: Exception) -> UsageError:
    if not url.startswith(_SCHEMES):
        return unusable(url, f"it begins with none of {' '.join(_SCHEMES)}")
    if unexpected := _UNEXPECTED.search(str(error)):
        return unusable(url, f"it has the unknown parameter {unexpected[1]!r}")
    text = str(error)
    return unusable(url, text if text.startswith(_QUOTES_NOTHING) else "its host, port or a parameter cannot be read")
