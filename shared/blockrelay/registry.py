"""Reading the worker registry: one definition of "who is there", sync and async."""

import time
from typing import Any, cast

import redis
import redis.asyncio

from blockrelay.keys import Keys
from blockrelay.plan import Plan, WorkerInfo

#: Workers of a cell; one more waits outside. What reads the registry reads all of it, so this bounds scripts too.
MAX_WORKERS = 1024


def _ask(pipeline: Any, keys: Keys, worker: str) -> None:
    pipeline.hgetall(keys.worker(worker))
    pipeline.exists(keys.inbox(worker))
    pipeline.scard(keys.on(worker))


def _infos(beats: list[tuple[bytes, float]], answers: list[Any], now_ms: int, model: str) -> list[WorkerInfo]:
    infos: list[WorkerInfo] = []
    for i, (worker, beat_ms) in enumerate(beats):
        fields, inbox, running = answers[3 * i : 3 * i + 3]
        if fields and fields.get(b"model", b"").decode() == model:
            infos.append(
                WorkerInfo.from_redis(
                    worker.decode(),
                    fields,
                    ready=bool(inbox),
                    running=int(running),
                    silent_ms=max(0, now_ms - int(beat_ms)),
                )
            )
    return sorted(infos, key=lambda w: (w.registered_ms, w.id))


def read_workers(client: redis.Redis, keys: Keys, model: str) -> list[WorkerInfo]:
    """Registered workers of `model`, oldest first (ready or not, alive or not). Times are the server's clock."""
    head = client.pipeline(transaction=False)
    head.zrange(keys.workers, 0, -1, withscores=True)
    head.time()
    beats, now = cast(Any, head.execute())
    body = client.pipeline(transaction=False)
    for worker, _ in beats:
        _ask(body, keys, worker.decode())
    return _infos(beats, body.execute(), now[0] * 1000 + now[1] // 1000, model)


async def read_workers_async(client: redis.asyncio.Redis, keys: Keys, model: str) -> list[WorkerInfo]:
    """As `read_workers`."""
    head = client.pipeline(transaction=False)
    head.zrange(keys.workers, 0, -1, withscores=True)
    head.time()
    beats, now = cast(Any, await head.execute())
    body = client.pipeline(transaction=False)
    for worker, _ in beats:
        _ask(body, keys, worker.decode())
    return _infos(beats, await body.execute(), now[0] * 1000 + now[1] // 1000, model)


def read_plan(client: redis.Redis, keys: Keys, model: str) -> Plan | None:
    """The plan in force, or None."""
    return Plan.from_redis(cast(Any, client.hgetall(keys.plan(model))))


async def read_plan_async(client: redis.asyncio.Redis, keys: Keys, model: str) -> Plan | None:
    """As `read_plan`."""
    return Plan.from_redis(await cast(Any, client.hgetall(keys.plan(model))))


def server_ms() -> int:
    """This host's Unix time in milliseconds. Only for fields that people read; scripts use the server's clock."""
    return int(time.time() * 1000)
