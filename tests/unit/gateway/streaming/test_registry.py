"""Which followed request a reader gets while the request is being given up, and how a gateway checks records."""

import signal
import time
from dataclasses import dataclass
from typing import Any, cast

import pytest
import redis.asyncio

from blockrelay.errors import RedisUnavailable
from blockrelay.protocol.messages import TokenEntry
from blockrelay.protocol.number import PROTOCOL
from blockrelay.redis import client as redis_link
from blockrelay_gateway.streaming.active_requests.abandonment import Abandonment
from blockrelay_gateway.streaming.active_requests.accounting import RequestAccounting
from blockrelay_gateway.streaming.active_requests.gateway_lease import GatewayLease
from blockrelay_gateway.streaming.active_requests.lost_request_repair import LostRequestRepair
from blockrelay_gateway.streaming.active_requests.request_registry import RequestRegistry
from blockrelay_gateway.streaming.log_tailer import Tailer
from blockrelay_gateway.streaming.records import Records
from tests.support.gateway.links import followed, links_on
from tests.support.redis.redis_server import RedisServer


@dataclass(frozen=True, slots=True)
class Parts:
    registry: RequestRegistry
    repair: LostRequestRepair


def parts_on(client: redis.asyncio.Redis) -> Parts:
    links = links_on(client)
    tailer, followers = Tailer(links), GatewayLease(links)
    registry = RequestRegistry(tailer, RequestAccounting(links), Abandonment(links, followers, grace_s=1))
    repair = LostRequestRepair(links, tailer, Records(links), followers, registry, now_ms=lambda: 0)
    return Parts(registry, repair)


@pytest.fixture
def registry() -> RequestRegistry:
    """Nothing of it reaches Redis."""
    return parts_on(redis_link.connect_async("redis://127.0.0.1:1", connections=1)).registry


async def test_the_first_entry_says_which_numerics_id_it_has(registry: RequestRegistry) -> None:
    one = followed()
    registry.start(one)
    registry.receive(one, TokenEntry(1, 7, numerics="n1"))
    assert one.numerics == "n1"
    registry.receive(one, TokenEntry(2, 8))
    assert one.numerics == "n1"


async def test_one_that_is_given_up_is_followed_anew(registry: RequestRegistry) -> None:
    given_up = registry.join(followed())
    assert registry.join(followed()) is given_up, "while it is not, there is one for all"
    given_up.leaving = True
    again = registry.join(followed())
    assert again is not given_up and registry.join(followed()) is again and len(registry) == 1


async def test_but_not_from_under_a_reader(registry: RequestRegistry) -> None:
    given_up = registry.join(followed())
    given_up.leaving = True
    registry.attach(given_up)
    assert registry.join(followed()) is given_up


async def test_a_redis_that_stands_still_costs_one_timeout_for_all_requests(own_redis: RedisServer) -> None:
    hasty = redis_link.connect_async(f"{own_redis.url}?socket_timeout=0.2", connections=1)
    parts = parts_on(hasty)
    requests = [f"req-{i}" for i in range(4)]
    for request_id in requests:
        parts.registry.start(followed(request_id))
    assert own_redis.process is not None
    own_redis.process.send_signal(signal.SIGSTOP)
    with pytest.raises(RedisUnavailable):
        await parts.repair.check(time.monotonic())
    own_redis.process.send_signal(signal.SIGCONT)
    client = own_redis.client()
    client.ping()  # what was sent before has been read
    with client.monitor() as monitor:
        await parts.repair.check(time.monotonic())
        heard = [str(cast(Any, monitor.next_command())["command"]) for _ in range(1 + len(requests))]
    assert heard == [
        f"SET {{t}}:gateway:g {PROTOCOL} EX 15",
        *(f"HGET {{t}}:request:{request_id} state" for request_id in requests),
    ]
    client.close()
    await hasty.aclose()
