"""Connections to Redis and the running of script calls.

No automatic retry anywhere: redis-py may send a command twice. Scripts are idempotent, so `run` may be called again by
the caller that gets RedisTrouble; blocking reads and every other write are never repeated here.

Every client made here, its pipelines and the connections below raise RedisTrouble for what is not a bug of ours
(`blockrelay.redis.errors`).
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import hiredis
import redis
import redis.asyncio
import redis.asyncio.client
import redis.client

from blockrelay.errors import RedisTrouble, RedisUnavailable, UsageError
from blockrelay.failpoints import reach_script
from blockrelay.protocol.keys import Keys, declared
from blockrelay.protocol.transitions.calls import Call
from blockrelay.protocol.transitions.source import NAMES, source
from blockrelay.redis.connections import make_async_pool, make_pool, must_hold, must_hold_async
from blockrelay.redis.discovery import NOT_FOUND
from blockrelay.redis.errors import NO_PASSWORD, CommandError, ours, translated
from blockrelay.redis.protocol_check import check_protocol

T = TypeVar("T")
#: Commands that only read -> their answers, when replicas have what the server had (`read_what_replicas_have`).
ReadReplicated = Callable[[Sequence[Sequence[Any]]], Awaitable[list[Any]]]
#: Blocking reads end after this, so that a lost wake-up costs at most one second.
BLOCK_MS = 1000

_OPTIONS: dict[str, Any] = {
    "socket_timeout": BLOCK_MS / 1000 + 4,
    "socket_connect_timeout": 2,
    "health_check_interval": 0,
    "protocol": 2,
}


class _Pipeline(redis.client.Pipeline):
    def execute(self, raise_on_error: bool = True) -> list[Any]:
        with translated(self.connection_pool):
            return [ours(answer, self.connection_pool) for answer in super().execute(raise_on_error)]


class _Client(redis.Redis):
    def execute_command(self, *args: Any, **options: Any) -> Any:
        with translated(self.connection_pool):
            return super().execute_command(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> redis.client.Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _AsyncPipeline(redis.asyncio.client.Pipeline):
    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        with translated(self.connection_pool):
            return [ours(answer, self.connection_pool) for answer in await super().execute(raise_on_error)]


class _AsyncClient(redis.asyncio.Redis):
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        with translated(self.connection_pool):
            return await super().execute_command(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> redis.asyncio.client.Pipeline:
        return _AsyncPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


def connect(url: str, *, cell: str | None = None, answer_s: float | None = None) -> redis.Redis:
    """A synchronous client without retries. Connects lazily. `cell`: which one it is for; a cluster has its keys on one
    node. `answer_s`: how long an answer may take; None: somewhat longer than a blocking read. Raises UsageError."""
    limits = {} if answer_s is None else {"socket_timeout": answer_s, "socket_connect_timeout": answer_s}
    return _Client.from_pool(make_pool(url, cell, {**_OPTIONS, **limits}))


def connect_async(url: str, *, cell: str | None = None, connections: int = 32) -> redis.asyncio.Redis:
    """As `connect`, for asyncio; a task that finds all `connections` in use waits for one."""
    return _AsyncClient.from_pool(make_async_pool(url, cell, _OPTIONS, connections=connections))


#: How long replicas may take to have what was written. Seconds.
REPLICAS_S = 1.0
#: A connection that has answered so lately is not looked at before it is used.
LOOK_AFTER_S = 0.01


class OneConnection:
    """A connection of `client`'s pool that is kept, for one thread that sends many commands, one at a time.

    A client takes a connection from its pool for every command and gives it back: that is most of a command's work.
    """

    def __init__(self, client: redis.Redis) -> None:
        """Connects lazily."""
        self._pool = client.connection_pool
        self._connection: redis.Connection | None = None
        self._answered = float("-inf")

    def ask(self, *words: str | bytes | int) -> Any:
        """The answer to one command, as the server gives it. Raises what a client raises; connects again after that."""
        with translated(self._pool):
            if self._connection is None:
                self._connection = self._pool.get_connection()
            connection = self._connection
            must_hold(connection)
            if time.monotonic() - self._answered > LOOK_AFTER_S and _has_news(connection):
                connection.disconnect()  # nothing was asked, so the server has closed it
            # A script is given two dozen keys: redis-py packs them one by one, in a fifth of the time of the command.
            connection.send_packed_command([hiredis.pack_command(cast(Any, words))])
            answer = connection.read_response()
            self._answered = time.monotonic()
            return answer


def _has_news(connection: redis.Connection) -> bool:
    try:
        with translated():
            return connection.can_read()
    except RedisTrouble:
        return True


def _named_keys(keys: Keys, script: str) -> list[str | int]:
    """How many keys EVALSHA is given, and they: one of each family that the script touches."""
    samples = [keys.sample(family) for family in declared(script.upper())]
    return [len(samples), *samples]


class Scripts:
    """Runs calls of one cell on a synchronous client."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client, self._keys = client, keys
        self._heads = {script: _named_keys(keys, script) for script in NAMES}
        self._send: Callable[..., Any] = client.execute_command

    def run(self, call: Call[T]) -> T:
        """EVALSHA, and EVAL once when the script cache is empty (restart, SCRIPT FLUSH)."""
        code = source(call.script)
        tail: list[Any] = [*self._heads[call.script], call.packed()]
        reach_script("before", call.script)
        try:
            answer = self._send("EVALSHA", code.sha, *tail)
        except RedisUnavailable as error:
            if error.code != "NOSCRIPT":
                raise
            answer = self._send("EVAL", code.text, *tail)
        reach_script("after", call.script)
        return call.parse(answer)

    def for_one_thread(self) -> "Scripts":
        """The same on a connection of its own, for a thread that calls all the time."""
        scripts = Scripts(self._client, self._keys)
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
        with translated(self._pool):
            if self._connection is None:
                self._connection = cast(redis.asyncio.Connection, await self._pool.get_connection())
            await must_hold_async(self._connection)
            await self._connection.send_command(*words)
            return await self._connection.read_response()


class AsyncScripts:
    """Runs calls of one cell on an asyncio client."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._heads = {script: _named_keys(keys, script) for script in NAMES}

    async def run(self, call: Call[T], *, replicas: int = 0) -> T:
        """As `Scripts.run`. With `replicas`, it returns when so many replicas have what the script wrote.

        When they have not within REPLICAS_S, RedisUnavailable is raised, and the script has run, as it may have after a
        lost connection. Redis counts what its own connection wrote: the script must write something whenever its answer
        is a promise.
        """
        code = source(call.script)
        tail: list[Any] = [*self._heads[call.script], call.packed()]
        reach_script("before", call.script)
        try:
            answer = await self._ask(replicas, "EVALSHA", code.sha, *tail)
        except RedisUnavailable as error:
            if error.code != "NOSCRIPT":
                raise
            answer = await self._ask(replicas, "EVAL", code.text, *tail)
        reach_script("after", call.script)
        return call.parse(answer)

    async def read_what_replicas_have(self, replicas: int, stream: str, reads: Sequence[Sequence[Any]]) -> list[Any]:
        """The answers to `reads`, when so many replicas have all that the server had which gave them.

        Writes one entry to `stream`, which keeps no other. Raises RedisUnavailable when they have not in REPLICAS_S.
        """
        return (await self._wait(replicas, *reads, ("XADD", stream, "MAXLEN", "1", "*", "w", "")))[:-1]

    async def _ask(self, replicas: int, *words: Any) -> Any:
        if not replicas:
            return await cast(Any, self._client.execute_command(*words))
        return (await self._wait(replicas, words))[0]

    async def _wait(self, replicas: int, *commands: Sequence[Any]) -> list[Any]:
        together = self._client.pipeline(transaction=False)  # over one connection, and so to one server
        for words in (*commands, ("WAIT", replicas, int(1000 * REPLICAS_S))):
            together.execute_command(*words)
        *answers, copies = await together.execute(raise_on_error=False)
        for failed in (*answers, copies):
            if isinstance(failed, Exception):
                raise failed
        if copies < replicas:
            raise RedisUnavailable(f"Redis does not answer: {copies} of {replicas} replicas have what was written")
        return answers


def backoff_s(attempt: int) -> float:
    """Seconds before attempt `attempt` (0-based) of reaching Redis again: 20 ms, each a tenth longer, up to 1 s.

    So it is seen to be back after a tenth more of the time that it was away, at most 1 s.
    """
    return min(1.0, 0.02 * 1.1 ** min(attempt, 50))


#: Answers by which Redis says, at the start, that it will never serve this user, or that it is not a Redis.
_NEVER = ("NOAUTH", "WRONGPASS", NO_PASSWORD, "NOPERM", "DENIED", "INVALID", "DB", NOT_FOUND)


#: Seconds in which, at the start of a service, Redis may learn a password that stands in a file: Secrets reach pods one
#: after the other.
LET_IN_S = 90.0


class NotLetInYet(UsageError):
    """Redis does not know the password that a file has now; both may change. `trouble` is what it said."""

    def __init__(self, message: str, trouble: RedisTrouble) -> None:
        super().__init__(message)
        self.trouble = trouble


def check_redis(client: redis.Redis, name: str, *, cell: Keys | None = None) -> None:
    """One look at a Redis, as services take it when they start.

    With `cell` we join it: we must have the right to run scripts there, and speak its protocol.
    Raises UsageError when it will never serve us like this (wrong password, a user without rights, not a Redis, one
    without EVAL, another protocol), else RedisTrouble when it does not answer now. `name` tells people which it is.
    """
    try:
        client.ping()
        if cell is not None:
            client.eval("return redis.call('EXISTS', KEYS[1])", 1, cell.workers)
            check_protocol(client, cell, join=True)
    except RedisTrouble as error:
        if error.code not in _NEVER:
            raise
        if error.code == NOT_FOUND:
            raise UsageError(f"the {name} is not found: {error}") from error
        if error.code == "INVALID":
            raise UsageError(f"the {name} is not a Redis: {error}") from error
        says = f"the {name} does not let us in: {error}"
        raise (NotLetInYet(says, error) if isinstance(error, RedisUnavailable) else UsageError(says)) from error
    except CommandError as error:
        raise UsageError(f"the {name} does not support what we need: {error}") from error


def wait_for_redis(
    look: Callable[[], None],
    say: Callable[[RedisTrouble], None],
    *,
    give_up: Callable[[], bool] = lambda: False,
    pause: Callable[[float], object] = time.sleep,
    let_in_s: float = LET_IN_S,
) -> bool:
    """Block until `look` (`check_redis`) does not raise RedisTrouble, or return False when `give_up` says so.

    `say` hears of every failure; `pause` waits for so many seconds, or until there is reason to give up. Raises
    NotLetInYet when a password in a file has been refused for `let_in_s`.
    """
    attempt, refused_at = 0, None
    while not give_up():
        try:
            look()
            return True
        except NotLetInYet as error:
            refused_at = refused_at or time.monotonic()
            if time.monotonic() - refused_at >= let_in_s:
                raise
            say(error.trouble)
        except RedisTrouble as error:
            refused_at = None
            say(error)
        pause(backoff_s(attempt))
        attempt += 1
    return False


def server_run_id(client: redis.Redis) -> str:
    """Identity of the server process: another value after a reconnect means a restart."""
    return str(client.info("server")["run_id"])
