"""BLOCKRELAY_ACCEPT_REPLICAS: what is accepted is on replicas, so that a failover cannot erase it."""

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import redis

from blockrelay.errors import RedisUnavailable
from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import LogEntry, TokenEntry
from blockrelay.protocol.transitions import calls
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import AsyncScripts, Scripts
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission import accept as admission
from blockrelay_gateway.streaming import log_tailer
from blockrelay_gateway.streaming.log_tailer import Tailer
from blockrelay_gateway.streaming.records import Records
from blockrelay_launcher.supervisor.ports import kept_ports
from tests.support.cell import MODEL, begin_cell, body
from tests.support.gateway.links import links_on
from tests.support.gateway.played import RunningGateway, running_gateway
from tests.support.redis.redis_proxy import RedisProxy, proxied
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

BODY = {"prompt": [5, 6], "background": True}


class Pair:
    """A master behind a proxy, and its replica."""

    def __init__(self, master: RedisServer, replica: RedisServer, proxy: RedisProxy) -> None:
        self.master, self.replica, self.proxy = master, replica, proxy

    def freeze(self) -> None:
        """The replica gets nothing any more; its connection stays."""
        assert self.replica.process is not None
        self.replica.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.replica.process is not None
        self.replica.process.send_signal(signal.SIGCONT)

    def has(self, answered: str) -> bool:
        """Whether the replica has the request that a client calls so."""
        with self.replica.client() as client:
            return bool(client.exists(Keys("t").request(own_id(answered))))

    def state(self, answered: str) -> object:
        """The request's state on the replica."""
        with self.replica.client() as client:
            return client.hget(Keys("t").request(own_id(answered)), "state")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with kept_ports("127.0.0.1", 0, 1) as (port,):
        master = RedisServer(tmp_path / "m", port=port).start()
    replica = RedisServer(tmp_path / "r").start()
    try:
        with master.client() as client:
            begin_cell(client, Keys("t"))
            client.config_set("repl-diskless-sync-delay", 0)
        with replica.client() as client, proxied(master) as proxy:
            client.execute_command("REPLICAOF", "127.0.0.1", port)
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "it follows")  # pyright: ignore
            yield Pair(master, replica, proxy)
    finally:
        for server in (replica, master):
            server.stop()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the waits for replicas and for ACCEPT."""
    monkeypatch.setattr(redis_link, "REPLICAS_S", 0.2)
    monkeypatch.setattr(admission, "ACCEPT_RETRY_S", 0.5)


@pytest.fixture
def guarded(settings: GatewaySettings, pair: Pair) -> Iterator[RunningGateway]:
    with running_gateway(settings.model_copy(update={"redis_url": pair.proxy.url, "accept_replicas": 1})) as running:
        yield running


def test_what_is_accepted_is_on_the_replica(guarded: RunningGateway, pair: Pair) -> None:
    for _ in range(20):
        answer = guarded.post("/v1/completions", **BODY)
        assert answer.status_code == 202 and pair.has(answer.json()["id"])


def test_without_the_replica_nothing_is_accepted_and_nothing_stays(
    guarded: RunningGateway, pair: Pair, hasty: None
) -> None:
    pair.freeze()
    try:
        refused = guarded.post("/v1/completions", **BODY)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        with pair.master.client() as client:
            wait_until(lambda: not client.zcard(Keys("t").running), "what was begun is taken back")
    finally:
        pair.thaw()
    wait_until(lambda: guarded.post("/v1/completions", **BODY).status_code == 202, "the replica is back")


def test_a_second_attempt_does_not_take_the_word_of_its_own_connection(
    guarded: RunningGateway, pair: Pair, hasty: None
) -> None:
    """The first ACCEPT runs and its connection is lost before WAIT has answered. The second finds the record."""
    pair.freeze()
    try:
        pair.proxy.lose_reply(b"EVALSHA")
        headers = {"Idempotency-Key": "k"}
        refused = guarded.http.post("/v1/completions", json=BODY, headers=headers)
        assert pair.proxy.lost_replies == 1
        assert refused.status_code == 503, "the replica does not have it"
    finally:
        pair.thaw()

    def accepted() -> bool:
        answer = guarded.http.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 503 or pair.has(answer.json()["id"])
        return answer.status_code == 202

    wait_until(accepted, "the replica is back")


def test_a_cancellation_that_is_answered_is_on_the_replica(guarded: RunningGateway, pair: Pair) -> None:
    for _ in range(20):
        request = guarded.post("/v1/completions", **BODY).json()["id"]
        answer = guarded.http.delete(f"/v1/requests/{request}")
        assert answer.status_code == 200 and answer.json()["status"] == "cancelled"
        assert pair.state(request) == b"done"


def test_without_the_replica_a_cancellation_is_not_answered_however_often_it_is_asked_for(
    guarded: RunningGateway, pair: Pair, request: pytest.FixtureRequest
) -> None:
    """It has ended on the master from the first on: a DELETE that finds it so writes too, and waits for that."""
    name = guarded.post("/v1/completions", **BODY).json()["id"]
    request.getfixturevalue("hasty")  # not before: the first one is to be accepted, however slow the replica is
    pair.freeze()
    try:
        for _ in range(2):
            refused = guarded.http.delete(f"/v1/requests/{name}")
            assert refused.status_code == 503 and refused.headers["retry-after"]
        with pair.master.client() as client:
            assert client.hget(Keys("t").request(own_id(name)), "state") == b"done"
    finally:
        pair.thaw()

    def cancelled() -> bool:
        answer = guarded.http.delete(f"/v1/requests/{name}")
        assert answer.status_code == 503 or pair.state(name) == b"done"
        return answer.status_code == 200

    wait_until(cancelled, "the replica is back")


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k"}], ids=["without a key", "with a key"])
def test_a_connection_that_is_cut_before_it_has_waited_accepts_once_and_waits(
    guarded: RunningGateway, pair: Pair, headers: dict[str, str]
) -> None:
    """ACCEPT has run, WAIT has not. The gateway tries again by itself, and what it finds was written by another."""
    model = guarded.gateway.served.folder.model_key
    assert guarded.post("/v1/completions", **BODY).status_code == 202, "Redis knows the script"
    with pair.master.client() as client, ThreadPoolExecutor() as pool:
        pair.freeze()
        try:
            pair.proxy.cut_between(b"WAIT")
            asked = pool.submit(guarded.http.post, "/v1/completions", json=BODY, headers=headers)
            wait_until(lambda: waits(client), "the second attempt waits")
            assert pair.proxy.lost_replies == 1 and cell_books(client, model)[b"accepted"] == b"2"
            assert not asked.done()
        finally:
            pair.thaw()
        answer = asked.result(30)
        assert answer.status_code == 202 and pair.has(answer.json()["id"])
        with pair.replica.client() as replica:
            for server in (client, replica):
                assert server.zcard(Keys("t").running) == 2 and cell_books(server, model)[b"accepted"] == b"2"


def waits(client: redis.Redis) -> bool:
    """True if a client of Redis waits for the replicas."""
    return any(one["cmd"] == "wait" and "b" in one["flags"] for one in client.client_list())  # pyright: ignore


def test_a_cancellation_that_is_cut_before_it_has_waited_is_asked_for_again(
    guarded: RunningGateway, pair: Pair
) -> None:
    request = guarded.post("/v1/completions", **BODY).json()["id"]
    pair.proxy.cut_between(b"WAIT")
    assert guarded.http.delete(f"/v1/requests/{request}").status_code == 503 and pair.proxy.lost_replies == 1
    assert guarded.http.delete(f"/v1/requests/{request}").status_code == 200 and pair.state(request) == b"done"
    with pair.replica.client() as replica:
        books = cell_books(replica, guarded.gateway.served.folder.model_key)
        assert (books[b"accepted"], books[b"ended:cancelled"]) == (b"1", b"1")


async def test_a_connection_that_finds_an_end_writes_too(pair: Pair) -> None:
    keys = Keys("t")
    call = calls.finish("req-1", "cancelled", confirm=True)
    with pair.master.client() as client:
        Scripts(client, keys).run(calls.accept("req-1", body(), model=MODEL, pages_needed=1, max_in_flight=9))
        pair.freeze()
        try:
            assert Scripts(client, keys).run(call) == "FINISHED"
            before = client.info("replication")["master_repl_offset"]  # pyright: ignore
            books = cell_books(client)
            other = redis_link.connect_async(pair.master.url, connections=1)
            with pytest.raises(RedisUnavailable, match="0 of 1 replicas have"):
                await AsyncScripts(other, keys).run(call, replicas=1)
            await other.aclose()
            assert client.info("replication")["master_repl_offset"] > before, "it has written"  # pyright: ignore
            assert cell_books(client) == books, "and changed nothing"
        finally:
            pair.thaw()


async def test_a_connection_that_finds_the_record_writes_too(pair: Pair) -> None:
    """WAIT promises nothing of what other connections wrote (Redis 7.0 counts it all the same)."""
    keys = Keys("t")
    call = calls.accept("req-1", body(), model=MODEL, pages_needed=1, max_in_flight=9, confirm=True)
    pair.freeze()
    try:
        with pair.master.client() as client:
            assert Scripts(client, keys).run(call).status == "OK"
            before = client.info("replication")["master_repl_offset"]  # pyright: ignore
        other = redis_link.connect_async(pair.master.url, connections=1)
        with pytest.raises(RedisUnavailable, match="0 of 1 replicas have"):
            await AsyncScripts(other, keys).run(call, replicas=1)
        await other.aclose()
        with pair.master.client() as client:
            assert client.info("replication")["master_repl_offset"] > before, "it has written"  # pyright: ignore
            assert cell_books(client)[b"accepted"] == b"1", "and changed nothing"
    finally:
        pair.thaw()


def cell_books(client: redis.Redis, model: str = MODEL) -> dict[bytes, bytes]:
    return cast(dict[bytes, bytes], client.hgetall(Keys("t").totals(model)))


def test_one_replica_is_not_two(settings: GatewaySettings, pair: Pair, hasty: None) -> None:
    with running_gateway(settings.model_copy(update={"redis_url": pair.proxy.url, "accept_replicas": 2})) as gateway:
        assert gateway.post("/v1/completions", **BODY).status_code == 503


async def test_tokens_that_nobody_could_commit_again_are_shown_when_the_replica_has_them(
    pair: Pair, hasty: None
) -> None:
    """Only tokens of a nondeterministic device wait."""
    client, keys = redis_link.connect_async(pair.master.url), Keys("t")
    scripts, came = AsyncScripts(client, keys), asyncio.Event()
    heard = {"exact": list[LogEntry](), "varying": list[LogEntry]()}
    replicated = partial(scripts.read_what_replicas_have, 1, keys.wake("g"))
    links = links_on(client, replicated=replicated)
    tailer, records = Tailer(links), Records(links)

    def hear(request_id: str, entry: LogEntry) -> None:
        heard[request_id].append(entry)
        came.set()

    async def add(request_id: str, position: int) -> None:
        entry = {"token": "7"} | ({"varies": "1"} if request_id == "varying" else {})
        await client.xadd(keys.log(request_id), entry, id=f"{position}-0")  # pyright: ignore[reportArgumentType]

    async def until(request_id: str, count: int) -> None:
        async with asyncio.timeout(20):
            while len(heard[request_id]) < count:
                await came.wait()
                came.clear()

    for request_id in heard:
        tailer.subscribe(request_id, partial(hear, request_id))
    reading = asyncio.create_task(tailer.run())
    await add("varying", 1)
    await until("varying", 1)
    pair.freeze()
    await add("varying", 2)
    for position in range(1, 4):
        await add("exact", position)
        await until("exact", position)
    assert len(heard["varying"]) == 1, "no replica has the second"
    with pytest.raises(RedisUnavailable, match="0 of 1 replicas have"):
        await records.read("varying")
    assert len((await records.read("exact"))[1]) == 3
    pair.thaw()
    await until("varying", 2)
    assert [len(entries) for entries in heard.values()] == [3, 2]
    assert len((await records.read("varying"))[1]) == 2
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await client.aclose()


async def test_a_token_that_another_master_does_not_have_is_not_shown(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover comes between the read and the wait, and the new master's replicas have all that it has."""
    client, keys = redis_link.connect_async(pair.master.url), Keys("t")
    replicated = partial(AsyncScripts(client, keys).read_what_replicas_have, 1, keys.wake("g"))
    tailer = Tailer(links_on(client, replicated=replicated))
    heard, came, log = list[LogEntry](), asyncio.Event(), keys.log("varying")

    def hear(entry: LogEntry) -> None:
        heard.append(entry)
        came.set()

    lost = list[str]()

    def after_read(point: str) -> None:
        with pair.master.client() as other:
            if point == "gateway.after_read" and not lost and other.exists(log):
                lost.append(log)
                other.delete(log)
                other.xadd(log, {"token": "8", "varies": "1"}, id="1-0")

    monkeypatch.setattr(log_tailer, "reach", after_read)
    tailer.subscribe("varying", hear)
    reading = asyncio.create_task(tailer.run())
    await client.xadd(log, {"token": "7", "varies": "1"}, id="1-0")
    async with asyncio.timeout(20):
        await came.wait()
    assert lost and [entry.token for entry in heard if isinstance(entry, TokenEntry)] == [8]
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await client.aclose()
