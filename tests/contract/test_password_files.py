"""Passwords of Redis in files: every connection that is made takes the password that the file has then."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from blockrelay.errors import RedisRefused, RedisTrouble, RedisUnavailable, ServiceUnavailable, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.redis import client as redis_link
from blockrelay.redis.cell_address import CellAddress, connected
from blockrelay.redis.client import AsyncOneConnection, OneConnection
from blockrelay.redis.subscription import subscribed, subscribed_async
from blockrelay.settings import Settings
from tests.support.redis.redis_server import RedisServer
from tests.support.swapped_folder import SwappedFolder
from tests.support.waiting import wait_until

KEYS = Keys("t")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis with a user `service` that has the passwords `one` and `two`."""
    found = RedisServer(tmp_path / "r", users=["user service on >one >two ~* &* +@all"]).start()
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture
def admin(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> SwappedFolder:
    return SwappedFolder(tmp_path / "s", {"password": "one\n"})


@pytest.fixture
def url(server: RedisServer, folder: SwappedFolder) -> str:
    return f"unix://service@{server.socket}?password_file={folder / 'password'}"


def forget(admin: redis.Redis, password: str) -> None:
    """Redis knows it no longer, and everybody who came with it, or with another one, has to come again."""
    admin.execute_command("ACL", "SETUSER", "service", f"<{password}")
    admin.execute_command("CLIENT", "KILL", "USER", "service")


def rotate(admin: redis.Redis, folder: SwappedFolder) -> None:
    folder.swap({"password": "two\n"})
    forget(admin, "one")


def again(action: Callable[[], Any]) -> Any:
    """What it gives at last, as by those who wait for a Redis that is away."""
    found: list[Any] = []

    def works() -> bool:
        with suppress(RedisUnavailable):
            found.append(action())
        return bool(found)

    wait_until(works, "Redis lets us in again")
    return found[0]


async def again_async(action: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(30):
        while True:
            with suppress(RedisUnavailable):
                return await action()
            await asyncio.sleep(0)


def test_a_connection_that_is_there_goes_on_and_a_new_one_takes_the_new_password(
    url: str, admin: redis.Redis, folder: SwappedFolder
) -> None:
    with redis_link.connect(url) as client:
        first = client.client_id()
        folder.swap({"password": "two\n"})
        admin.execute_command("ACL", "SETUSER", "service", "<one")
        assert client.client_id() == first, "Redis asks for no password again"
        admin.execute_command("CLIENT", "KILL", "USER", "service")
        assert again(client.client_id) != first


WAYS: dict[str, Callable[[redis.Redis], Callable[[], Any]]] = {
    "command": lambda client: client.client_id,
    "pipeline": lambda client: lambda: client.pipeline(transaction=False).ping().execute(),  # pyright: ignore
    "transaction": lambda client: lambda: client.pipeline(transaction=True).ping().execute(),  # pyright: ignore
    "script": lambda client: lambda: client.eval("return 1", 0),
    "blocking read": lambda client: lambda: client.xread({"nothing": "0"}, block=1) or "nothing",
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_a_thread_to_redis_survives_a_rotation(
    url: str, admin: redis.Redis, folder: SwappedFolder, way: str
) -> None:
    with redis_link.connect(url) as client:
        action = WAYS[way](client)
        assert action()
        rotate(admin, folder)
        assert again(action)


def test_so_do_a_kept_connection_and_a_subscription(url: str, admin: redis.Redis, folder: SwappedFolder) -> None:
    with redis_link.connect(url) as client:
        kept, listening = OneConnection(client), subscribed(client, "c")
        assert kept.ask("PING") and next(listening) is None
        rotate(admin, folder)
        assert again(lambda: kept.ask("PING")) == b"PONG"
        with pytest.raises(RedisUnavailable):
            while True:
                next(listening)
        assert again(lambda: next(subscribed(client, "c"))) is None


def test_so_does_every_way_of_a_task(url: str, admin: redis.Redis, folder: SwappedFolder) -> None:
    async def run() -> None:
        client = redis_link.connect_async(url, connections=4)
        kept, listening = AsyncOneConnection(client), subscribed_async(client, "c")

        async def piped(*, transaction: bool) -> Any:
            return await cast(Any, client.pipeline(transaction=transaction).ping()).execute()

        ways: tuple[Callable[[], Awaitable[Any]], ...] = (
            lambda: cast(Awaitable[Any], client.ping()),
            lambda: piped(transaction=False),
            lambda: piped(transaction=True),
            lambda: kept.ask("PING"),
        )
        for way in ways:
            assert await way()
        assert await anext(listening) is None
        await asyncio.to_thread(rotate, admin, folder)
        for way in ways:
            assert await again_async(way)
        with pytest.raises(RedisUnavailable):
            while True:
                await anext(listening)
        fresh = subscribed_async(client, "c")
        assert await again_async(lambda: anext(fresh)) is None
        await fresh.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        await client.aclose()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "said"),
    [("wrong\n", "WRONGPASS"), ("\nwrong\n", "its first line has no password"), ("", "its first line has no password")],
)
def test_a_password_that_does_not_do_is_trouble_that_passes_and_says_what_helps(
    url: str, admin: redis.Redis, folder: SwappedFolder, content: str, said: str
) -> None:
    with redis_link.connect(url) as client:
        assert client.ping()
        folder.swap({"password": content})
        admin.execute_command("CLIENT", "KILL", "USER", "service")
        found: list[RedisTrouble] = []

        def refused() -> bool:
            with pytest.raises(RedisTrouble) as caught:
                client.ping()
            found.append(caught.value)
            return bool(caught.value.code)

        wait_until(refused, "it is refused")
        assert isinstance(found[-1], RedisUnavailable), "nobody ends, requests wait a little"
        line = str(found[-1])
        assert said in line and f"{folder / 'password'}" in line and "ACL LOAD" in line and "wrong" not in line
        folder.swap({"password": "two\n"})
        assert client.ping()


def test_a_file_that_is_gone_for_a_moment_is_trouble_that_passes(
    url: str, admin: redis.Redis, folder: SwappedFolder
) -> None:
    with redis_link.connect(url) as client:
        assert client.ping()
        (folder / "password").unlink()
        assert client.ping(), "nobody reads it while the connection is there"
        admin.execute_command("CLIENT", "KILL", "USER", "service")
        wait_until(lambda: not answers(client), "the connection is gone")
        with pytest.raises(RedisUnavailable, match="No such file"):
            client.ping()
        (folder / "password").write_text("one\nanother\n")  # the first line is the one in use
        assert client.ping()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisTrouble:
        return False


@pytest.mark.parametrize("content", ["wrong\n", ""])
def test_a_service_that_starts_waits_until_redis_knows_its_password(
    url: str, folder: SwappedFolder, content: str
) -> None:
    folder.swap({"password": content})
    heard: list[str] = []

    def say(error: RedisTrouble) -> None:
        heard.append(str(error))
        folder.swap({"password": "two\n"})

    with redis_link.connect(url) as client:
        look = lambda: redis_link.check_redis(client, "control Redis", cell=KEYS)  # noqa: E731
        assert redis_link.wait_for_redis(look, say)
        assert len(heard) == 1 and str(folder / "password") in heard[0]
        folder.swap({"password": content})
        client.connection_pool.disconnect()
        with pytest.raises(UsageError, match=r"^the control Redis does not let us in: .*/password"):
            redis_link.wait_for_redis(look, say, let_in_s=0)
        assert len(heard) == 1, "the line that ends it says so"


@pytest.mark.parametrize("content", ["wrong\n", ""])
def test_a_single_look_does_not_wait(url: str, folder: SwappedFolder, content: str) -> None:
    folder.swap({"password": content})
    with (
        redis_link.connect(url) as client,
        pytest.raises(UsageError, match=r"^the control Redis does not let us in: .*/password"),
    ):
        redis_link.check_redis(client, "control Redis", cell=KEYS)


def test_a_command_is_told_what_helps_and_not_to_look_whether_redis_runs(url: str, folder: SwappedFolder) -> None:
    folder.swap({"password": "wrong\n"})
    with pytest.raises(ServiceUnavailable) as told, connected(CellAddress(url, Settings())):
        pass
    assert "ACL LOAD" in str(told.value) and "is it running" not in str(told.value)


def test_a_wrong_password_of_the_url_is_refused_as_before(server: RedisServer) -> None:
    with redis_link.connect(f"unix://service:wrong@{server.socket}") as client, pytest.raises(RedisRefused):
        client.ping()


def test_a_redis_without_users_takes_the_password_of_the_file(own_redis: RedisServer, folder: SwappedFolder) -> None:
    with own_redis.client() as open_to_all:
        open_to_all.config_set("requirepass", "one")
        with redis_link.connect(f"{own_redis.url}?password_file={folder / 'password'}") as client:
            assert client.ping()
        open_to_all.config_set("requirepass", "")


def test_settings_name_the_file(server: RedisServer, folder: SwappedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKRELAY_REDIS_URL", f"unix://service@{server.socket}")
    monkeypatch.setenv("BLOCKRELAY_PAYLOAD_REDIS_URL", f"unix://service@{server.socket}?db=1")
    monkeypatch.setenv("BLOCKRELAY_REDIS_PASSWORD_FILE", str(folder / "password"))
    settings = Settings()
    for url in (settings.control_redis, settings.payload_redis or ""):
        with redis_link.connect(url) as client:
            assert client.ping()
