"""Which flight a request's reader gets while the request is being given up, and how a gateway checks flights."""

import signal
import time
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import redis.asyncio
from prometheus_client import CollectorRegistry

from blockrelay.errors import RedisUnavailable
from blockrelay.observability.metrics import GatewayMetrics
from blockrelay.protocol import transitions as calls
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import AsyncScripts
from blockrelay.redis.errors import RedisWatch
from blockrelay_gateway.streaming.followed_requests import Flight, Flights
from blockrelay_gateway.streaming.log_tailer import Tailer
from tests.support.redis_server import RedisServer


def flight(request: str = "req-1") -> Flight:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    body = RequestBody(prompt=np.array([1], np.int32), params=params.to_dict())
    accept = partial(calls.accept, request, body, model="m", need_pages=1)
    return Flight(request=request, body=body, params=params, created=0, accept=accept)


def flights_on(client: redis.asyncio.Redis, metrics: GatewayMetrics) -> Flights:
    keys, watch = Keys("t"), RedisWatch(metrics.redis_errors)
    scripts, tailer = AsyncScripts(client, keys, retention_s=9), Tailer(client, keys, "g", metrics, watch)
    return Flights(client, keys, scripts, tailer, metrics, watch, gateway="g", model="m", grace_s=1, retention_s=9)


@pytest.fixture
def flights() -> Flights:
    """Nothing of them reaches Redis."""
    return flights_on(
        redis_link.connect_async("redis://127.0.0.1:1", connections=1), GatewayMetrics(CollectorRegistry())
    )


async def test_one_that_is_given_up_is_followed_anew(flights: Flights) -> None:
    given_up = flights.join(flight())
    assert flights.join(flight()) is given_up, "while it is not, there is one for all"
    given_up.leaving = True
    again = flights.join(flight())
    assert again is not given_up and flights.join(flight()) is again and len(flights) == 1


async def test_but_not_from_under_a_reader(flights: Flights) -> None:
    given_up = flights.join(flight())
    given_up.leaving = True
    flights.attach(given_up)
    assert flights.join(flight()) is given_up


async def test_a_redis_that_stands_still_costs_one_timeout_for_all_flights(own_redis: RedisServer) -> None:
    hasty = redis_link.connect_async(f"{own_redis.url}?socket_timeout=0.2", connections=1)
    flights = flights_on(hasty, GatewayMetrics(CollectorRegistry()))
    requests = [f"req-{i}" for i in range(4)]
    for request in requests:
        flights.start(flight(request))
    assert own_redis.process is not None
    own_redis.process.send_signal(signal.SIGSTOP)
    with pytest.raises(RedisUnavailable):
        await flights.check(time.monotonic())
    own_redis.process.send_signal(signal.SIGCONT)
    client = own_redis.client()
    client.ping()  # what was sent before has been read
    with client.monitor() as monitor:
        await flights.check(time.monotonic())
        heard = [str(cast(Any, monitor.next_command())["command"]) for _ in range(1 + len(requests))]
    assert heard == ["SET {t}:gateway:g  EX 15", *(f"HGET {{t}}:request:{request} state" for request in requests)]
    client.close()
    await hasty.aclose()
