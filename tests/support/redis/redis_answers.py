"""Ways to make a real Redis answer that it cannot do what it is asked; each ends as it was."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, cast

import redis

from blockrelay.errors import RedisFull, RedisRefused, RedisTrouble, RedisUnavailable
from blockrelay.redis.errors import CommandError
from tests.support.beside import beside
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

#: What a client is told -> the error that it becomes. `LOADING` needs a proxy (`RedisProxy.answer`).
ANSWERS: dict[str, type[RedisTrouble]] = {
    "OOM": RedisFull,
    "MISCONF": RedisRefused,
    "READONLY": RedisUnavailable,
    "BUSY": RedisUnavailable,
    "NOPERM": RedisRefused,
    "NOREPLICAS": RedisUnavailable,
}
#: What a proxy says for a server that cannot be made to say it.
LINES = {
    "OOM": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "MISCONF": b"-MISCONF Redis is configured to save RDB snapshots, but it is unable to persist to disk.\r\n",
    "READONLY": b"-READONLY You can't write against a read only replica.\r\n",
    "LOADING": b"-LOADING Redis is loading the dataset in memory\r\n",
    "BUSY": b"-BUSY Redis is busy running a script.\r\n",
    "NOPERM": b"-NOPERM this user has no permissions to run the command\r\n",
    "NOSCRIPT": b"-NOSCRIPT No matching script. Please use EVAL.\r\n",
    "UNBLOCKED": b"-UNBLOCKED force unblock from blocking operation, instance state changed\r\n",
}
_ADMIN = "+acl +client +script +config +info +replicaof +ping"


@contextmanager
def _admin(server: RedisServer) -> Iterator[redis.Redis]:
    client = server.client()
    try:
        yield client
    finally:
        client.close()


@contextmanager
def _oom(admin: redis.Redis, _: RedisServer) -> Generator[None]:
    before = cast(dict[str, str], admin.config_get("maxmemory"))["maxmemory"]
    admin.config_set("maxmemory", 1)
    try:
        yield
    finally:
        admin.config_set("maxmemory", before)


@contextmanager
def _misconf(admin: redis.Redis, server: RedisServer) -> Generator[None]:
    """A folder where the snapshot belongs, so that saving fails."""
    place = server.folder / "dump.rdb"
    place.mkdir()
    admin.config_set("save", "3600 1000000")
    admin.bgsave()
    wait_until(lambda: cast(Any, admin.info("persistence"))["rdb_last_bgsave_status"] == "err", "saving has failed")
    try:
        yield
    finally:
        admin.config_set("save", "")
        place.rmdir()


@contextmanager
def _readonly(admin: redis.Redis, _: RedisServer) -> Generator[None]:
    """A replica of nobody."""
    admin.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        yield
    finally:
        admin.execute_command("REPLICAOF", "NO", "ONE")


@contextmanager
def _busy(admin: redis.Redis, server: RedisServer) -> Generator[None]:
    """A script that does not end, until it is killed."""
    admin.config_set("lua-time-limit", 20)

    def run() -> None:
        with _admin(server) as client, suppress(CommandError, RedisTrouble):
            client.eval("while true do end", 0)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def is_busy() -> bool:
        try:
            admin.ping()
        except RedisUnavailable as error:
            return error.code == "BUSY"
        return False

    wait_until(is_busy, "Redis is busy")
    try:
        yield
    finally:
        admin.script_kill()
        thread.join()


@contextmanager
def _noperm(admin: redis.Redis, _: RedisServer) -> Generator[None]:
    """The user of all services may do nothing, but what the test needs to give its rights back."""
    admin.execute_command("ACL", "SETUSER", "default", "-@all", *_ADMIN.split())
    try:
        yield
    finally:
        admin.execute_command("ACL", "SETUSER", "default", "+@all")


@contextmanager
def _noreplicas(admin: redis.Redis, _: RedisServer) -> Generator[None]:
    admin.config_set("min-replicas-to-write", 1)
    try:
        yield
    finally:
        admin.config_set("min-replicas-to-write", 0)


_WAYS: dict[str, Callable[[redis.Redis, RedisServer], AbstractContextManager[None]]] = {
    "OOM": _oom,
    "MISCONF": _misconf,
    "READONLY": _readonly,
    "BUSY": _busy,
    "NOPERM": _noperm,
    "NOREPLICAS": _noreplicas,
}


@contextmanager
def answering(server: RedisServer, answer: str) -> Iterator[redis.Redis]:
    """Meanwhile `server` gives this answer (of ANSWERS) to all writes, or to everything. A client for the test."""
    with _admin(server) as admin, _WAYS[answer](admin, server):
        yield admin


def unblock_all(admin: redis.Redis) -> bool:
    """End every blocking read with an error; whether there was one."""
    clients = admin.client_list()
    ended = [admin.execute_command("CLIENT", "UNBLOCK", client["id"], "ERROR") for client in clients]
    return any(ended)


@contextmanager
def again_and_again(server: RedisServer, what: str) -> Iterator[None]:
    """Meanwhile, many times a second: `NOSCRIPT` empties the script cache, `UNBLOCKED` ends every blocking read."""

    def run(over: threading.Event) -> None:
        with _admin(server) as admin:
            while not over.wait(0.01):
                if what == "NOSCRIPT":
                    admin.script_flush()
                else:
                    unblock_all(admin)

    with beside(run):
        yield
