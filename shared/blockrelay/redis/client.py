"""Redis clients, and the running of script calls on them.

No command is retried automatically, since redis-py could then send one twice. Scripts are idempotent, so a caller that
gets RedisTrouble may call `run` again.

The clients, pipelines and connections of this module raise RedisTrouble for every error that is not a bug of the caller
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
#: Function from commands that only read to their answers, once replicated (`AsyncScripts.read_what_replicas_have`).
ReadReplicated = Callable[[Sequence[Sequence[Any]]], Awaitable[list[Any]]]
#: Milliseconds after which blocking reads end, so that a lost wake-up costs at most one second.
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

    def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        with translated(self.connection_pool):  # WATCH, and reads behind it
            return super().immediate_execute_command(*args, **options)


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
    """Returns a synchronous client without retries, which connects when it is first used.

    Raises UsageError if `url` cannot be used, and ValueError if it is that of a cluster and `cell` is None.
    `cell`: the cell that it is for, needed for a cluster, where one node has all keys of a cell. `answer_s`: seconds
    that an answer may take; None: 4 s longer than a blocking read.
    """
    limits = {} if answer_s is None else {"socket_timeout": answer_s, "socket_connect_timeout": answer_s}
    return _Client.from_pool(make_pool(url, cell, {**_OPTIONS, **limits}))


def connect_async(url: str, *, cell: str | None = None, connections: int = 32) -> redis.asyncio.Redis:
    """Returns an asyncio client; otherwise as `connect`. A task that finds all `connections` in use waits for one."""
    return _AsyncClient.from_pool(make_async_pool(url, cell, _OPTIONS, connections=connections))


#: Seconds that replicas may take to confirm a write.
REPLICAS_S = 1.0
#: Seconds without an answer after which a kept connection is checked before it is used: the server may have closed it.
LOOK_AFTER_S = 0.01


class OneConnection:
    """A connection that one thread keeps, to send many commands one at a time.

    It saves taking a connection from the client's pool for each command, which is most of a command's cost.
    """

    def __init__(self, client: redis.Redis) -> None:
        """Uses the pool of `client`, and connects at the first command."""
        self._pool = client.connection_pool
        self._connection: redis.Connection | None = None
        self._answered = float("-inf")

    def ask(self, *words: str | bytes | int) -> Any:
        """Sends one command and returns the server's raw answer. Raises what a client raises.

        After a lost connection the next command connects again.
        """
        with translated(self._pool):
            if self._connection is None:
                self._connection = self._pool.get_connection()
            connection = self._connection
            must_hold(connection)
            if time.monotonic() - self._answered > LOOK_AFTER_S and _has_news(connection):
                connection.disconnect()  # no answer is due, so the server has closed it
            # A script gets two dozen keys. redis-py packs them one by one, which takes a fifth of the command's time.
            connection.send_packed_command([hiredis.pack_command(cast(Any, words))])
            answer = connection.read_response()
            self._answered = time.monotonic()
            return answer

    def close(self) -> None:
        """Gives the connection back to the pool. The next command takes one again."""
        if self._connection is not None:
            self._pool.release(self._connection)
            self._connection = None


def _has_news(connection: redis.Connection) -> bool:
    try:
        with translated():
            return connection.can_read()
    except RedisTrouble:
        return True


def _named_keys(keys: Keys, script: str) -> list[str | int]:
    """Returns the arguments of EVALSHA for keys: their number, and one key of each family that the script touches."""
    samples = [keys.sample(family) for family in declared(script.upper())]
    return [len(samples), *samples]


class Scripts:
    """Runs script calls of one cell on a synchronous client."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client, self._keys = client, keys
        self._heads = {script: _named_keys(keys, script) for script in NAMES}
        self._send: Callable[..., Any] = client.execute_command
        #: Gives back the connection of `for_one_thread`, whose thread must have ended.
        self.give_back: Callable[[], None] = lambda: None

    def run(self, call: Call[T]) -> T:
        """Runs one call and returns its result. Raises RedisTrouble; the script may then have run.

        Sends EVALSHA, and EVAL if the server does not have the script (after a restart or SCRIPT FLUSH).
        """
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
        """Returns Scripts on a connection of their own, for one thread that makes many calls."""
        scripts, kept = Scripts(self._client, self._keys), OneConnection(self._client)
        scripts._send, scripts.give_back = kept.ask, kept.close
        return scripts


class AsyncOneConnection:
    """A connection that one asyncio task keeps, to send many commands one at a time."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        """Uses the pool of `client`, and connects at the first command."""
        self._pool = client.connection_pool
        self._connection: redis.asyncio.Connection | None = None

    async def ask(self, *words: Any) -> Any:
        """Sends one command and returns the server's raw answer. Raises what a client raises.

        After a lost connection the next command connects again.
        """
        with translated(self._pool):
            if self._connection is None:
                self._connection = cast(redis.asyncio.Connection, await self._pool.get_connection())
            await must_hold_async(self._connection)
            await self._connection.send_command(*words)
            return await self._connection.read_response()


class AsyncScripts:
    """Runs script calls of one cell on an asyncio client."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._heads = {script: _named_keys(keys, script) for script in NAMES}

    async def run(self, call: Call[T], *, replicas: int = 0) -> T:
        """Runs one call and returns its result, as `Scripts.run` does; with `replicas`, once that many have its writes.

        Raises RedisUnavailable when they do not confirm within REPLICAS_S; the script has then run. WAIT covers only
        writes of its own connection, so a script whose answer must survive a failover always writes something.
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
        """Returns the answers to `reads` once `replicas` replicas have all data that the answers are from.

        It writes one entry to `stream`, which keeps no other, and waits until they confirm that. Raises
        RedisUnavailable when they do not within REPLICAS_S.
        """
        return (await self._wait(replicas, *reads, ("XADD", stream, "MAXLEN", "1", "*", "w", "")))[:-1]

    async def _ask(self, replicas: int, *words: Any) -> Any:
        if not replicas:
            return await cast(Any, self._client.execute_command(*words))
        return (await self._wait(replicas, words))[0]

    async def _wait(self, replicas: int, *commands: Sequence[Any]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)  # one connection, and so one server
        for words in (*commands, ("WAIT", replicas, int(1000 * REPLICAS_S))):
            pipeline.execute_command(*words)
        *answers, copies = await pipeline.execute(raise_on_error=False)
        for failed in (*answers, copies):
            if isinstance(failed, Exception):
                raise failed
        if copies < replicas:
            raise RedisUnavailable(f"Redis does not answer: {copies} of {replicas} replicas have what was written")
        return answers


def backoff_s(attempt: int) -> float:
    """Returns the seconds to wait before attempt `attempt` (from 0) to reach Redis: 20 ms, each 1.1 times the last.

    A Redis that is back is thus noticed after a tenth of the time that it was away, and after 1 s at most.
    """
    return min(1.0, 0.02 * 1.1 ** min(attempt, 50))


#: Codes of errors at the start that waiting will not mend: Redis refuses this user, or the server is not a Redis.
_NEVER = ("NOAUTH", "WRONGPASS", NO_PASSWORD, "NOPERM", "DENIED", "INVALID", "DB", NOT_FOUND)


#: Seconds that a starting service waits for Redis to accept a password from a file, since a new Secret reaches pods one
#: after the other.
LET_IN_S = 90.0


class NotLetInYet(UsageError):
    """Redis refuses the password that a file has now; either may still change. `trouble` is Redis' answer."""

    def __init__(self, message: str, trouble: RedisTrouble) -> None:
        super().__init__(message)
        self.trouble = trouble


def check_redis(client: redis.Redis, name: str, *, cell: Keys | None = None) -> None:
    """Checks once that a service can use a Redis. `name` tells people which one it is.

    With `cell` the service joins that cell: it must have the right to run scripts there, and speak its protocol.
    Raises UsageError when waiting would not help (wrong password, a user without rights, not a Redis, one without EVAL,
    another protocol), else RedisTrouble when Redis does not answer now. A UsageError for a password from a file is
    NotLetInYet: for it, waiting may help.
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
    """Calls `look` (`check_redis`) until it does not raise RedisTrouble; returns False when `give_up()` is true.

    It calls `say` for each failure, and `pause(seconds)` between attempts, which may return early when there is reason
    to give up. Raises NotLetInYet when Redis has refused a password in a file for `let_in_s` seconds. Every other error
    of `look` ends the wait at once.
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
    """Returns the id of the server process; another value after a reconnect means that it restarted."""
    return str(client.info("server")["run_id"])
