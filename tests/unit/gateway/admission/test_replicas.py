"""BLOCKRELAY_ACCEPT_REPLICAS: what is accepted is on replicas, so that a failover cannot erase it."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from blockrelay.errors import RedisUnavailable
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.transitions import calls
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import AsyncScripts, Scripts
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission import accept as admission
from blockrelay_launcher.supervisor.ports import kept_ports
from tests.support.cell import MODEL, begin_cell, body
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
            return bool(client.exists(Keys("t").request(answered.replace("cmpl-", "req-"))))


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
    """Nobody waits long for replicas."""
    monkeypatch.setattr(redis_link, "REPLICAS_S", 0.2)
    monkeypatch.setattr(admission, "RETRY_FOR_S", 0.5)


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
            assert cell_totals(client, keys) == b"1", "and changed nothing"
    finally:
        pair.thaw()


def cell_totals(client: redis.Redis, keys: Keys) -> object:
    return client.hget(keys.totals(MODEL), "accepted")


def test_one_replica_is_not_two(settings: GatewaySettings, pair: Pair, hasty: None) -> None:
    with running_gateway(settings.model_copy(update={"redis_url": pair.proxy.url, "accept_replicas": 2})) as gateway:
        assert gateway.post("/v1/completions", **BODY).status_code == 503
