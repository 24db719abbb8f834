"""Answers of Redis that are not bugs of ours, as errors of ours: the one place that tells them apart.

A server that is away, loads, is busy, fails over, is full, cannot save or does not let us is trouble: callers wait or
shed (`blockrelay.errors.RedisTrouble`). Everything else (a wrong type, an unknown command, an error in a script) is a
bug of the caller, and stays what redis-py raises: `CommandError`. No other package imports `redis.exceptions`.
"""

import re
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

from prometheus_client import Counter
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.connection import SSLConnection
from redis.exceptions import (  # noqa: TID251
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    InvalidResponse,
    RedisError,
    ResponseError,
    TimeoutError,
    WatchError,
)

from blockrelay.errors import RedisFull, RedisRefused, RedisTrouble, RedisUnavailable
from blockrelay.observability import logs

#: The first word of an error that says something about the server and nothing about our command.
_BY_CODE: dict[str, type[RedisTrouble]] = {
    "OOM": RedisFull,
    **dict.fromkeys(
        ("LOADING", "BUSY", "READONLY", "UNBLOCKED", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "NOSCRIPT"),
        RedisUnavailable,
    ),
    **dict.fromkeys(
        ("MISCONF", "NOPERM", "NOAUTH", "WRONGPASS", "DENIED", "MOVED", "ASK", "DB", "PROTOCOL"), RedisRefused
    ),
}
#: The keys are elsewhere. Under a looked-up address that passes, under one server's it stays.
_ELSEWHERE = ("MOVED", "ASK")
#: The server is a replica now, or not the owner of our keys.
_DEMOTED = ("READONLY", "MOVED", "MASTERDOWN", "UNBLOCKED")
#: No answer (""), or one that a server gives in the course of a failover.
_DOUBTFUL = ("", "ASK", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "LOADING")
#: What redis-py puts before the error of a command in a pipeline, tasks' pipelines as a tuple; what the command was may
#: be anything.
_PIPELINE = re.compile(r".* of pipeline caused error: (?:\([\"'])?", re.DOTALL)
#: Redis 6.2 hides the error of a command in a script behind where it happened.
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -?([A-Z]+) ")
_ABORTED = re.compile(r"Transaction discarded because of: ([A-Z]+) ")
#: Redis gives these no code. The first is that of 7.0, the second of Valkey and of Redis from 7.2 on; the third: a
#: command of more than ten words before AUTH.
_NO_CODE = {
    "The user executing the script can't ": "NOPERM",
    "ACL failure in script: ": "NOPERM",
    "Protocol error: unauthenticated ": "NOAUTH",
    "DB index is out of range": "DB",
}
SAY_EVERY_S = 10.0
#: The server does not take this command as it is; waiting does not help.
CommandError = ResponseError
#: For what redis-py cannot see and yet is to be treated as its own errors.
Unreachable, TimedOut = ConnectionError, TimeoutError
#: For a connection that has no password to show.
NoPassword = AuthenticationError
#: `RedisTrouble.code` of a file of a password that cannot be used.
NO_PASSWORD = "PASSWORD"
#: Answers about who we are. With a password in a file they pass: the file is read again for the next connection.
_NOT_LET_IN = ("WRONGPASS", "NOAUTH", NO_PASSWORD)
#: Of a transaction: somebody else has changed a key that it watches; nothing was done.
Overtaken = WatchError


def trouble(error: Exception, *, looked_up: bool = False) -> RedisTrouble | None:
    """`error`, raised by redis-py, as trouble of ours; None for a bug. `looked_up`: so is the server's address."""
    text = _PIPELINE.sub("", str(error), count=1)
    if isinstance(error, AuthenticationError | AuthorizationError):
        kind, code = RedisRefused, getattr(error, "status_code", None) or "WRONGPASS"
    elif (code := _code(error, text)) in _BY_CODE:
        kind = _BY_CODE[code]
    elif isinstance(error, ConnectionError | TimeoutError | OSError):
        kind, code = RedisUnavailable, ""
    elif isinstance(error, InvalidResponse):
        kind, code = RedisUnavailable, "INVALID"
    else:
        return None
    said = text if code in ("", NO_PASSWORD) or text.startswith(code) else f"{code} {text}"
    if code in _ELSEWHERE:
        if looked_up:
            kind = RedisUnavailable
        else:
            said += " (a node of a Redis Cluster is addressed as redis+cluster://HOST:PORT/0)"
    return kind(f"{kind.says}: {said}", code=code)


def _code(error: Exception, text: str) -> str:
    found = _IN_SCRIPT.search(text) or _ABORTED.search(text)
    if found:
        return found[1]
    for words, code in _NO_CODE.items():
        if words in text:
            return code
    told = error.status_code if isinstance(error, RedisError) else None
    return told if told and told != "ERR" else text.partition(" ")[0]


def casts_doubt(error: Exception) -> Literal["demoted", "doubtful", ""]:
    """What an error of redis-py says about the place of a looked-up server: that it is not there any more, perhaps not,
    or nothing."""
    found = trouble(error)
    if found is None:
        return ""
    return "demoted" if found.code in _DEMOTED else "doubtful" if found.code in _DOUBTFUL else ""


def ours(answer: Any, pool: Any = None) -> Any:
    """One answer of a pipeline that raises nothing: an error that is trouble as RedisTrouble, all else as it is. `pool`
    as in `translated`."""
    if not isinstance(answer, RedisError):
        return answer
    return trouble(answer, looked_up=_is_looked_up(pool)) or answer


@contextmanager
def translated(pool: Any = None) -> Generator[None]:
    """Raises RedisTrouble for what redis-py raises inside, bugs aside. `pool`: of the connections that are used."""
    try:
        yield
    except (RedisError, OSError) as error:
        if (told := trouble(error, looked_up=_is_looked_up(pool))) is None:
            raise
        if told.code in _NOT_LET_IN and pool is not None:
            told = _with_remedy(told, pool)
        if not told.code and pool is not None and _is_tls(pool) and not _not_reached(error):
            told = type(told)(f"{told} (over TLS, rediss://: a Redis without TLS does not answer that)")
        told.cell = getattr(pool, "cell", None)
        raise told from error


def _is_looked_up(pool: Any) -> bool:
    return pool is not None and "lookup" in pool.connection_kwargs


def _with_remedy(told: RedisTrouble, pool: Any) -> RedisTrouble:
    """The trouble of a client that is not let in, with the remedy if its password is in a file. That client waits as
    for a Redis that is away: a rotation is under way, or went wrong."""
    file = getattr(pool.connection_kwargs.get("credential_provider"), "file", None)
    if file is None:
        return told
    remedy = f"the password is the first line of {file}, read for each new connection: put one there that Redis knows"
    said = str(told).removeprefix(f"{told.says}: ")
    remedy += ", or let Redis read its users again (ACL LOAD)"
    return RedisUnavailable(f"Redis does not let us in: {said}; {remedy}", code=told.code)


def _is_tls(pool: Any) -> bool:
    return issubclass(pool.connection_class, SSLConnection | AsyncSSLConnection)


def _not_reached(error: BaseException | None) -> bool:
    """Whether nobody was there to speak TLS with."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | socket.gaierror):
            return True
        error = error.__cause__ or error.__context__
    return False


class RedisWatch:
    """Logs which work of this process waits for Redis: one line when the first begins to wait, one every 10 s, and one
    when no work waits any more. Thread-safe.

    `errors` counts every error that is reported to it, None before the process has metrics. Lines name the `cell`, if
    one is given: a gateway may have several.
    """

    def __init__(self, errors: Counter | None = None, *, cell: str = "") -> None:
        self._errors, self._lock = errors, threading.Lock()
        self._named = {"cell": cell} if cell else {}
        self._waiting: dict[str, RedisTrouble] = {}
        self._since = self._said_at = float("-inf")

    def count(self, errors: int) -> None:
        """Counts errors that need no log line."""
        if self._errors is not None:
            self._errors.inc(errors)

    def failed(self, work: str, error: RedisTrouble) -> None:
        """`work` has met trouble and will try again."""
        self.count(1)
        with self._lock:
            now = time.monotonic()
            if not self._waiting:
                self._since, self._said_at = now, float("-inf")
            self._waiting[work] = error
            if now - self._said_at >= SAY_EVERY_S:
                self._said_at = now
                logs.get().warning(
                    "REDIS_TROUBLE",
                    error=str(error),
                    work=sorted(self._waiting),
                    seconds=round(now - self._since, 1),
                    **self._named,
                )

    def met(self, error: RedisTrouble) -> None:
        """Something met trouble that is not tried again in the same place: it is told unless a line has just been."""
        self.count(1)
        with self._lock:
            now = time.monotonic()
            if now - self._said_at >= SAY_EVERY_S:
                self._said_at = now
                work = sorted(self._waiting)
                logs.get().warning("REDIS_TROUBLE", error=str(error), work=work, seconds=0.0, **self._named)

    def worked(self, work: str) -> None:
        """`work` does not wait, or no longer."""
        if work not in self._waiting:
            return
        with self._lock:
            if self._waiting.pop(work, None) and not self._waiting:
                logs.get().info("REDIS_BACK", seconds=round(time.monotonic() - self._since, 1), **self._named)

    @property
    def trouble(self) -> str:
        """What is wrong right now, as all who ask may hear it; empty when nobody waits."""
        with self._lock:
            return next((error.plainly for error in self._waiting.values()), "")
