"""Turns errors of redis-py into RedisTrouble, unless they are bugs; the only module that decides which is which.

Trouble is a server that is away, loads, is busy, fails over, is full, cannot save or refuses the user: callers wait or
reject work (`blockrelay.errors.RedisTrouble`). Any other error (a wrong type, an unknown command, an error in a script)
is a bug of the caller, and stays what redis-py raises: `CommandError`. No other package imports `redis.exceptions`.
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

#: First words of errors about the server's state, not about the command.
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
#: Codes of "another server has the keys". With a looked-up address this passes; with one server's address it does not.
_ELSEWHERE = ("MOVED", "ASK")
#: Codes of a server that is a replica now, or does not own the keys any more.
_DEMOTED = ("READONLY", "MOVED", "MASTERDOWN", "UNBLOCKED")
#: No answer (""), and codes that a server gives during a failover.
_DOUBTFUL = ("", "ASK", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "LOADING")
#: The text that redis-py puts before the error of a command in a pipeline (asyncio: before a tuple). It quotes the
#: command, so it may be anything.
_PIPELINE = re.compile(r".* of pipeline caused error: (?:\([\"'])?", re.DOTALL)
#: Redis 6.2 puts the error of a command in a script after the place in the script.
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -?([A-Z]+) ")
_ABORTED = re.compile(r"Transaction discarded because of: ([A-Z]+) ")
#: Errors that Redis gives no code. The first is from Redis 7.0, the second from Valkey and from Redis 7.2 on; the third
#: is for a command of more than ten words before AUTH.
_NO_CODE = {
    "The user executing the script can't ": "NOPERM",
    "ACL failure in script: ": "NOPERM",
    "Protocol error: unauthenticated ": "NOAUTH",
    "DB index is out of range": "DB",
}
#: Seconds between two log lines about Redis trouble.
SAY_EVERY_S = 10.0
#: The server refuses the command itself, so waiting does not help.
CommandError = ResponseError
#: Raised by our connections for failures that redis-py does not see but must handle as its own.
Unreachable, TimedOut = ConnectionError, TimeoutError
#: Raised for a connection whose password file cannot be used.
NoPassword = AuthenticationError
#: `RedisTrouble.code` when a password file cannot be used.
NO_PASSWORD = "PASSWORD"
#: Codes of refused users. With a password file they pass: each new connection reads the file again.
_NOT_LET_IN = ("WRONGPASS", "NOAUTH", NO_PASSWORD)
#: A transaction did nothing, because another client changed a key that it watches.
Overtaken = WatchError


def trouble(error: Exception, *, looked_up: bool = False) -> RedisTrouble | None:
    """Returns the RedisTrouble for `error` of redis-py; None for a bug.

    `looked_up`: Sentinels or cluster nodes name the server, so MOVED and ASK pass after another look-up.
    """
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
    message = text if code in ("", NO_PASSWORD) or text.startswith(code) else f"{code} {text}"
    if code in _ELSEWHERE:
        if looked_up:
            kind = RedisUnavailable
        else:
            message += " (a node of a Redis Cluster is addressed as redis+cluster://HOST:PORT/0)"
    return kind(f"{kind.says}: {message}", code=code)


def _code(error: Exception, text: str) -> str:
    match = _IN_SCRIPT.search(text) or _ABORTED.search(text)
    if match:
        return match[1]
    for words, code in _NO_CODE.items():
        if words in text:
            return code
    status = error.status_code if isinstance(error, RedisError) else None
    return status if status and status != "ERR" else text.partition(" ")[0]


def casts_doubt(error: Exception) -> Literal["demoted", "doubtful", ""]:
    """Returns what an error of redis-py means for a looked-up server.

    "demoted": it is not the master or owner any more. "doubtful": perhaps not. "": the error says nothing about that.
    """
    problem = trouble(error)
    if problem is None:
        return ""
    return "demoted" if problem.code in _DEMOTED else "doubtful" if problem.code in _DOUBTFUL else ""


def ours(answer: Any, pool: Any = None) -> Any:
    """Returns an answer of a pipeline, or the RedisTrouble for it if it is such an error. `pool`: as `translated`."""
    if not isinstance(answer, RedisError):
        return answer
    return trouble(answer, looked_up=_is_looked_up(pool)) or answer


@contextmanager
def translated(pool: Any = None) -> Generator[None]:
    """Raises RedisTrouble for errors of redis-py in its body, except bugs. `pool`: the pool of the connections used."""
    try:
        yield
    except (RedisError, OSError) as error:
        if (problem := trouble(error, looked_up=_is_looked_up(pool))) is None:
            raise
        if problem.code in _NOT_LET_IN and pool is not None:
            problem = _with_remedy(problem, pool)
        if not problem.code and pool is not None and _is_tls(pool) and not _not_reached(error):
            problem = type(problem)(f"{problem} (over TLS, rediss://: a Redis without TLS does not answer that)")
        problem.cell = getattr(pool, "cell", None)
        raise problem from error


def _is_looked_up(pool: Any) -> bool:
    return pool is not None and "lookup" in pool.connection_kwargs


def _with_remedy(problem: RedisTrouble, pool: Any) -> RedisTrouble:
    """Adds the remedy to the error of a refused user whose password is in a file.

    The error becomes RedisUnavailable, so that the client waits: a rotation of the password is under way, or failed.
    """
    file = getattr(pool.connection_kwargs.get("credential_provider"), "file", None)
    if file is None:
        return problem
    remedy = f"the password is the first line of {file}, read for each new connection: put one there that Redis knows"
    cause = str(problem).removeprefix(f"{problem.says}: ")
    remedy += ", or let Redis read its users again (ACL LOAD)"
    return RedisUnavailable(f"Redis does not let us in: {cause}; {remedy}", code=problem.code)


def _is_tls(pool: Any) -> bool:
    return issubclass(pool.connection_class, SSLConnection | AsyncSSLConnection)


def _not_reached(error: BaseException | None) -> bool:
    """Returns whether no server was reached, so that the error says nothing about TLS."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | socket.gaierror):
            return True
        error = error.__cause__ or error.__context__
    return False


class RedisWatch:
    """Logs which work of this process waits for Redis. Thread-safe.

    It logs one line when the first work begins to wait, one every 10 s, and one when no work waits any more.
    """

    def __init__(self, errors: Counter | None = None, *, cell: str = "") -> None:
        """`errors` counts all reported errors; None: the process has no metrics yet. Log lines name `cell` if given."""
        self._errors, self._lock = errors, threading.Lock()
        self._named = {"cell": cell} if cell else {}
        self._waiting: dict[str, RedisTrouble] = {}
        self._since = self._logged_at = float("-inf")

    def count(self, errors: int) -> None:
        """Counts errors that need no log line."""
        if self._errors is not None:
            self._errors.inc(errors)

    def failed(self, work: str, error: RedisTrouble) -> None:
        """Reports that `work` got an error and will try again, until `worked` is called for it."""
        self.count(1)
        with self._lock:
            now = time.monotonic()
            if not self._waiting:
                self._since, self._logged_at = now, float("-inf")
            self._waiting[work] = error
            self._say(error, now, now - self._since)

    def count_error(self, error: RedisTrouble) -> None:
        """Reports an error of work that is not tried again; logged unless a line was logged in the last 10 s."""
        self.count(1)
        with self._lock:
            self._say(error, time.monotonic(), 0.0)

    def _say(self, error: RedisTrouble, now: float, waited_s: float) -> None:
        """Logs an error at the time `now`, unless a line was logged in the last 10 s."""
        if now - self._logged_at >= SAY_EVERY_S:
            self._logged_at = now
            details = {"error": str(error), "work": sorted(self._waiting), "seconds": round(waited_s, 1)}
            logs.get().warning("REDIS_TROUBLE", **details, **self._named)

    def worked(self, work: str) -> None:
        """Reports that `work` succeeded, so that it does not wait for Redis any more."""
        if work not in self._waiting:
            return
        with self._lock:
            if self._waiting.pop(work, None) and not self._waiting:
                logs.get().info("REDIS_BACK", seconds=round(time.monotonic() - self._since, 1), **self._named)

    @property
    def trouble(self) -> str:
        """The current problem, in words without internal details; empty when no work waits."""
        with self._lock:
            return next((error.plainly for error in self._waiting.values()), "")
