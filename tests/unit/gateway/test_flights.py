"""Which flight a request's reader gets while the request is being given up. Nothing here reaches Redis."""

from functools import partial

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from blockrelay import redis_link
from blockrelay import scripts as calls
from blockrelay.keys import Keys
from blockrelay.messages import RequestBody
from blockrelay.metrics import GatewayMetrics
from blockrelay.redis_link import AsyncScripts
from blockrelay.sampling_params import SamplingParams
from blockrelay_gateway.flights import Flight, Flights
from blockrelay_gateway.tailer import Tailer


def flight() -> Flight:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    body = RequestBody(prompt=np.array([1], np.int32), params=params.to_dict())
    accept = partial(calls.accept, "req-1", body, model="m", need_pages=1)
    return Flight(request="req-1", body=body, params=params, created=0, accept=accept)


@pytest.fixture
def flights() -> Flights:
    client, keys = redis_link.connect_async("redis://127.0.0.1:1", connections=1), Keys("t")
    metrics = GatewayMetrics(CollectorRegistry())
    scripts, tailer = AsyncScripts(client, keys, retention_s=9), Tailer(client, keys, "g", metrics)
    return Flights(client, keys, scripts, tailer, metrics, gateway="g", model="m", grace_s=1, retention_s=9)


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
