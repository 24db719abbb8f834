"""Connections to Redis and the running of script calls.

No automatic retry anywhere: redis-py may send a command twice. Scripts are idempotent, so `run` may be called again by
whoever gets a ConnectionError; blocking reads and every other write are never repeated here.
"""

import asyncio
import builtins
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, NoScriptError, ReadOnlyError, TimeoutError
from redis.retry import Retry

from blockrelay.failpoints import reach_script
from blockrelay.keys import Keys, declared
from blockrelay.scripts import NAMES, Call, source

T = TypeVar("T")
#: Blocking reads end after this, so that a lost wake-up costs at most one second.
BLOCK_MS = 1000
#: What "Redis is not there right now" looks like; everything else is a bug or a refusal.
UNREACHABLE = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError, OSError)

_OPTIONS: dict[str, Any] = {
    "socket_timeout": BLOCK_MS / 1000 + 4,
    "socket_connect_timeout": 2,
    "health_check_interval": 0,
    "protocol": 2,
}


def connect(url: str) -> redis.Redis:
    """A synchronous client without retries. Connects lazily."""
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_OPTIONS)


def connect_async(url: str, *, connections: int = 32) -> redis.asyncio.Redis:
    """An asyncio client without retries. Connects lazily; who finds all `connections` in use waits for one."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url, max_connections=connections, retry=AsyncRetry(NoBackoff(), 0), **_OPTIONS
    )
    kind = cast(Any, pool.connection_class)  # TCP, TLS or unix socket: the URL says
    pool.connection_class = type(kind.__name__, (_Interruptible, kind), {})
    return redis.asyncio.Redis.from_pool(pool)


class _Interruptible:
    """A connection on which a task that sends can be cancelled at any moment.

    redis-py bounds a write with `asyncio.wait_for`, which on Python 3.11 swallows a cancellation that arrives while the
    write completes. Whoever was cancelled would go on for ever.
    """

    socket_timeout: float | None

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        patience, self.socket_timeout = self.socket_timeout, None  # the parent then waits without a limit of its own
        try:
            async with asyncio.timeout(patience):
                await cast(Any, super()).send_packed_command(command, check_health)
        except builtins.TimeoutError:
            raise TimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = patience


class OneConnection:
    """A connection of `client`'s pool that is kept, for one thread that sends many commands, one at a time.

    A client takes a connection from its pool for every command and gives it back: that is most of a command's work.
    """

    def __init__(self, client: redis.Redis) -> None:
        """Connects lazily."""
        self._pool = client.connection_pool
        self._connection: redis.Connection | None = None

    def ask(self, *words: Any) -> Any:
        """The answer to one command, as the server gives it. Raises what a client raises; connects again after that."""
        if self._connection is None:
            self._connection = self._pool.get_connection()
        connection = self._connection
        if _has_news(connection):  # nothing was asked, so the server has closed it
            connection.disconnect()
        connection.send_command(*words)
        return connection.read_response()


def _has_news(connection: redis.Connection) -> bool:
    try:
        return connection.can_read()
    except UNREACHABLE:
        return True


def _named_keys(keys: Keys, script: str) -> list[str | int]:
    """How many keys EVALSHA is given, and they: one of each family that the script touches."""
    samples = [keys.sample(family) for family in declared(script.upper())]
    return [len(samples), *samples]


class Scripts:
    """Runs calls of one cell on a synchronous client."""

    def __init__(self, client: redis.Redis, keys: Keys, *, retention_s: int) -> None:
        self._client, self._keys, self._retention_s = client, keys, retention_s
        self._heads = {script: _named_keys(keys, script) for script in NAMES}
        self._send: Callable[..., Any] = client.execute_command

    def run(self, call: Call[T]) -> T:
        """EVALSHA, and EVAL once when the script cache is empty (restart, SCRIPT FLUSH)."""
        code = source(call.script)
        tail: list[Any] = [*self._heads[call.script], self._retention_s, *call.args]
        reach_script("before", call.script)
        try:
            answer = self._send("EVALSHA", code.sha, *tail)
        except NoScriptError:
            answer = self._send("EVAL", code.text, *tail)
        reach_script("after", call.script)
        return call.parse(answer)

    def for_one_thread(self) -> "Scripts":
        """The same on a connection of its own, for a thread that calls all the time."""
        scripts = Scripts(self._client, self._keys, retention_s=self._retention_s)
        scripts._send = OneConnection(self._client).ask
        return scripts


class AsyncOneConnection:
    """As `OneConnection`, for one task on an asyncio client."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        """Connects lazily."""
        self._pool = client.connection_pool
        self._connection: redis.asyncio.Connection | None = None

    async def ask(self, *words: Any) -> Any:
        """As `OneConnection.ask`."""
        if self._connection is None:
            self._connection = cast(redis.asyncio.Connection, await self._pool.get_connection())
        await self._connection.send_command(*words)
        return await self._connection.read_response()


class AsyncScripts:
    """Runs calls of one cell on an asyncio client."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, *, retention_s: int) -> None:
        self._client, self._retention_s = client, retention_s
        self._heads = {script: _named_keys(keys, script) for script in NAMES}

    async def run(self, call: Call[T]) -> T:
        """As `Scripts.run`."""
        code = source(call.script)
        tail: list[Any] = [*self._heads[call.script], self._retention_s, *call.args]
        reach_script("before", call.script)
        try:
            answer = await cast(Any, self._client.evalsha(code.sha, *tail))
        except NoScriptError:
            answer = await cast(Any, self._client.eval(code.text, *tail))
        reach_script("after", call.script)
        return call.parse(answer)


def backoff_s(attempt: int) -> float:
    """Seconds before attempt `attempt` (0-based) of reaching Redis again: 20 ms doubling to 1 s."""
    return min(1.0, 0.02 * 2 ** min(attempt, 10))


def wait_for_redis(
    client: redis.Redis, say: Callable[[str], None], *, give_up: Callable[[], bool] = lambda: False
) -> bool:
    """Block until PING answers, or return False when `give_up` says so.

    `say` hears the first failure and then one line every 10 s.
    """
    attempt, said_at = 0, 0.0
    while not give_up():
        try:
            client.ping()
            return True
        except UNREACHABLE as error:
            if time.monotonic() - said_at > 10:
                say(f"Redis does not answer ({error}); waiting for it")
                said_at = time.monotonic()
            time.sleep(backoff_s(attempt))
            attempt += 1
    return False


def server_run_id(client: redis.Redis) -> str:
    """Identity of the server process: another value after a reconnect means a restart."""
    return str(client.info("server")["run_id"])
