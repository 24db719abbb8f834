"""What stops, and what befalls Redis: causes of alerts that no panel is for.

Discovery drops the targets of services that have stopped.
"""

import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.support.redis.redis_server import RedisServer
from tests.support.systems.causes import STORE, Cause, Watched, redis
from tests.support.waiting import wait_until


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """-9 for those that are there."""
    for process in processes:
        process.kill()
        process.wait()


def _stop_workers(on: Watched) -> None:
    _end(on.system.workers)
    on.prometheus.forget("blockrelay-worker")


def _start_workers(on: Watched) -> None:
    for _ in range(4):
        on.system.start_worker(**STORE)
    on.system.wait_ready(4)
    on.watch(on.system, scheduler=False)


@contextmanager
def gateways(on: Watched) -> Iterator[None]:
    """All gateways."""
    _end(on.system.gateways)
    on.prometheus.forget("blockrelay-gateway", "blockrelay-tenants")
    yield
    on.start_gateway()


@contextmanager
def schedulers(on: Watched) -> Iterator[None]:
    """All schedulers."""
    _end(on.system.schedulers)
    on.prometheus.forget("blockrelay-scheduler")
    yield
    on.start_scheduler()


@contextmanager
def idle(on: Watched) -> Iterator[None]:
    """All workers, while there is nothing to do."""
    wait_until(lambda: on.seen("max(blockrelay_workers_wanted) == 0"), "nothing is to be done")
    _stop_workers(on)
    yield
    _start_workers(on)


@contextmanager
def workers(on: Watched) -> Iterator[None]:
    """All workers, while a request waits."""
    _stop_workers(on)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(on.ask, [5, 6, 7], tokens=4)
        yield
        _start_workers(on)
        assert answer.result().status_code == 200


@contextmanager
def everything(on: Watched) -> Iterator[None]:
    """All processes and both Redis servers."""
    servers = (on.system.control, on.system.payload)
    _end([*on.system.gateways, *on.system.schedulers])
    on.prometheus.forget("blockrelay-gateway", "blockrelay-tenants", "blockrelay-scheduler")
    _stop_workers(on)
    for server in servers:
        server.kill()
    yield
    for server in servers:
        server.start()
    on.start_scheduler()
    on.start_gateway()
    _start_workers(on)


@contextmanager
def unwatched(on: Watched) -> Iterator[None]:
    """Nobody asks for Redis any more."""
    on.prometheus.forget("blockrelay-redis")
    yield
    on.prometheus.add("blockrelay-redis", on.system.control.url, on.system.payload.url)


@contextmanager
def replica(on: Watched) -> Iterator[None]:
    """A Redis that has lost the one that it follows."""
    server = RedisServer(on.system.folder / "replica").start()
    try:
        with server.client() as client:
            client.replicaof("127.0.0.1", 1)
            on.prometheus.add("blockrelay-redis", server.url)
            yield
            client.replicaof("NO", "ONE")
    finally:
        server.stop()
    on.prometheus.forget("blockrelay-redis")
    on.prometheus.add("blockrelay-redis", on.system.control.url, on.system.payload.url)


#: By the names that the drill has for them.
OUTAGES: dict[str, Cause] = {
    "gateways": gateways,
    "schedulers": schedulers,
    "workers": workers,
    "servers": redis,
    "everything": everything,
    "idle": idle,
    "unwatched": unwatched,
    "replica": replica,
}
