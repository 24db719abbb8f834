"""Status events between worker and gateway: published only while a client subscribes, and never waited for."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry

from blockrelay.auth.api_keys import ANYBODY, Tenant
from blockrelay.errors import RedisRefused
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.encoding.request_ids import public_id
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.status_events import NodeStatus, Shard, encode_events
from blockrelay.redis.client import Scripts, connect_async
from blockrelay.redis.errors import RedisWatch
from blockrelay.redis.users import CELL, rules
from blockrelay_gateway.streaming import status_events as hub
from blockrelay_worker.transport.redis_links import Links
from blockrelay_worker.transport.status_events import StatusEventPublisher
from tests.support.gateway.links import links_on
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

KEYS = Keys(CELL)


def status(request_id: str) -> NodeStatus:
    shard = Shard.of_blocks("tiny", 5, 5, 5)
    return NodeStatus(
        node="w", moment="start", prompt=False, shard=shard, request_id=request_id, position=0, rows=1, prompt_tokens=1
    )


def watch() -> RedisWatch:
    return RedisWatch(WorkerMetrics(CollectorRegistry()).redis_errors)


@pytest.fixture
def worker(own_redis: RedisServer) -> Iterator[StatusEventPublisher]:
    """A worker's side, running, on a Redis of its own."""
    client = own_redis.client()
    links = Links(client, client, KEYS, Scripts(client, KEYS), watch(), threading.Event())
    events = StatusEventPublisher(links)
    events.start()
    yield events
    events.close()
    client.close()


@asynccontextmanager
async def gateway(url: str) -> AsyncIterator[hub.StatusEventFeed]:
    """A gateway's side, running."""
    client = connect_async(url)
    events = hub.StatusEventFeed(links_on(client, cell=KEYS.cell))
    task = asyncio.create_task(events.run())
    try:
        yield events
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.aclose()


async def until(worker: StatusEventPublisher, followed: bool) -> None:
    await asyncio.to_thread(wait_until, lambda: worker.has_subscribers == followed, f"followed is {followed}")


def public(request_id: str) -> str:
    """What clients call it."""
    return public_id(request_id, KEYS.cell)


async def take(listener: hub.Listener, count: int) -> list[dict[str, Any]]:
    """The next `count` events."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(20):
        async for event in listener.events(silence_s=60):
            assert event is not None
            found.append(event)
            if len(found) == count:
                break
    return found


def test_the_head_alone_stands_at_the_last_layer() -> None:
    assert Shard.of_blocks("m", 5, 5, 5) == Shard(model="m", first=3, last=3, layers=4)
    assert Shard.of_blocks("m", 1, 2, 5) == Shard(model="m", first=0, last=1, layers=4)
    assert Shard.of_blocks("m", 1, 5, 5) == Shard(model="m", first=0, last=3, layers=4)


async def test_a_worker_publishes_while_somebody_listens(worker: StatusEventPublisher, own_redis: RedisServer) -> None:
    async with gateway(own_redis.url) as events:
        assert not worker.has_subscribers
        with hub.Listener([events], ANYBODY) as listener:
            await until(worker, followed=True)
            worker.put([status(f"req-{i}") for i in range(1000)])
            heard = await take(listener, 1000)
        assert [event["request_id"] for event in heard] == [public(f"req-{i}") for i in range(1000)]
        assert heard[0] == {**status("req-0").to_json(), "request_id": public("req-0")}
        await until(worker, followed=False)


async def test_events_come_again_behind_a_redis_that_was_away(
    worker: StatusEventPublisher, own_redis: RedisServer
) -> None:
    async with gateway(own_redis.url) as events:
        with hub.Listener([events], ANYBODY) as listener:
            await until(worker, followed=True)
            own_redis.kill()
            await until(worker, followed=False)
            own_redis.start()
            await until(worker, followed=True)
            worker.put([status("req-1")])
            assert (await take(listener, 1))[0]["request_id"] == public("req-1")


async def test_a_message_that_cannot_be_read_is_passed_over(own_redis: RedisServer) -> None:
    client = own_redis.client()
    async with gateway(own_redis.url) as events:
        with hub.Listener([events], ANYBODY) as listener:
            good = encode_events([status("req-1")])
            bad = (b"\xff", b"7", b"[7]", b"[{}]", b'[{"request_id": 7}]')
            await asyncio.to_thread(wait_until, lambda: client.publish(KEYS.status_channel, b"[]"), "it listens")
            for message in (*bad, good):
                client.publish(KEYS.status_channel, message)
            assert [event["request_id"] for event in await take(listener, 1)] == [public("req-1")]
    client.close()


async def test_a_slow_listener_is_told_how_much_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "STATUS_EVENTS_KEPT", 2)
    client = connect_async("redis://localhost:1")
    events = hub.StatusEventFeed(links_on(client, cell=KEYS.cell))
    with hub.Listener([events], ANYBODY) as listener:
        for i in range(5):
            listener.put(status(f"req-{i}").to_json())
        first, second = await take(listener, 2)
    assert first == {"type": "dropped", "count": 3}
    assert second["request_id"] == "req-0"
    await client.aclose()


async def test_whose_request_it_is_comes_from_its_record(worker: StatusEventPublisher, own_redis: RedisServer) -> None:
    client = own_redis.client()
    client.hset(KEYS.request("req-1"), mapping={"model": "m", "tenant": "ada"})
    client.hset(KEYS.request("req-2"), mapping={"model": "m"})
    for name in ("req-1", "req-2"):
        client.expire(KEYS.request(name), 60)
    async with gateway(own_redis.url) as events:
        ada, chief = Tenant(name="ada"), Tenant(name="chief", operator=True)
        with hub.Listener([events], ada) as of_ada, hub.Listener([events], chief) as of_chief:
            await until(worker, followed=True)
            worker.put([status("req-1"), status("req-2"), status("req-unknown")])
            assert [event["request_id"] for event in await take(of_ada, 3)] == [public("req-1"), None, None]
            assert [event["request_id"] for event in await take(of_chief, 3)] == [
                public(name) for name in ("req-1", "req-2", "req-unknown")
            ]
    client.close()


def test_the_users_for_others_may_do_just_that(own_redis: RedisServer) -> None:
    admin = own_redis.client()
    clients: dict[str, redis.Redis] = {}
    for rule in rules("control")[1:]:
        _, name, on, _, *rights = rule.split()
        admin.execute_command("ACL", "SETUSER", name, on, ">pw", *rights)
        kind, options = admin.connection_pool.connection_class, admin.connection_pool.connection_kwargs
        pool = redis.ConnectionPool(connection_class=kind, **options | {"username": name, "password": "pw"})
        clients[name] = type(admin).from_pool(pool)
    channel = KEYS.status_channel
    listening = clients["gateway"].pubsub()
    listening.subscribe(channel)
    wait_until(lambda: admin.pubsub_numsub(channel)[0][1] == 1, "it listens")
    assert clients["worker"].publish(channel, b"[]") == 1
    for name, act in (
        ("scheduler", lambda: clients["scheduler"].publish(channel, b"[]")),
        ("gateway", lambda: clients["gateway"].publish(channel, b"[]")),
        ("worker", lambda: clients["worker"].publish("other", b"[]")),
    ):
        with pytest.raises(RedisRefused):
            act()
            pytest.fail(name)
    listening.close()
    for client in (*clients.values(), admin):
        client.close()
