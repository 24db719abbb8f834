"""A worker that a test plays enters the registry through the worker's own code."""

import threading

import redis
from prometheus_client import Counter

from blockrelay.protocol.capabilities import Capabilities
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.plan import Device, parse_split
from blockrelay.redis.client import Scripts
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import WorkerSettings
from blockrelay_worker.lifecycle.registration import Registration, StageAssignment
from blockrelay_worker.transport.redis_links import Links

_watch = RedisWatch(Counter("errors", "Redis errors of played workers", registry=None))


def enter(client: redis.Redis, keys: Keys, name: str, *, model: str, numerics: str, device: Device = "cpu") -> None:
    """Register `name` as a worker that waits for a stage."""
    _registration(client, keys, name, model, device, numerics)._enter()  # pyright: ignore[reportPrivateUsage]


def announce(
    client: redis.Redis,
    keys: Keys,
    name: str,
    *,
    model: str,
    split: str,
    stage: int,
    pages: int,
    slots: int,
    numerics: str,
    device: Device = "cpu",
    capabilities: Capabilities | None = None,
    varies: bool = False,
    slow: str = "",
    succeeds: str = "",
    loads_beside: bool = False,
) -> None:
    """Register `name` as a worker of this stage, ready and with its inbox; both Redis servers are one."""
    registration = _registration(client, keys, name, model, device, numerics, varies, slow, succeeds, loads_beside)
    assignment = StageAssignment(split, stage, parse_split(split)[stage], epoch=0)
    registration.announce(assignment, pages=pages, slots=slots, capabilities=capabilities)


def _registration(
    client: redis.Redis,
    keys: Keys,
    name: str,
    model: str,
    device: Device,
    numerics: str,
    varies: bool = False,
    slow: str = "",
    succeeds: str = "",
    loads_beside: bool = False,
) -> Registration:
    links = Links(client, client, keys, Scripts(client, keys), _watch, threading.Event())
    registration = Registration(
        links,
        WorkerSettings(device=device, host="h", threads=1),
        model=model,
        numerics=numerics,
        port=0,
        nondeterministic=varies,
        slow=slow,
        succeeds=succeeds,
        loads_beside=loads_beside,
    )
    registration.worker_id = name
    return registration
