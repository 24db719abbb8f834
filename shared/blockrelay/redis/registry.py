"""Reading what a cell tells of itself: one definition of "who is there", sync and async, the plan, and the books."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import redis
import redis.asyncio

from blockrelay.protocol.keys import Keys
from blockrelay.protocol.number import is_spoken, number_of
from blockrelay.protocol.plan import Plan, WorkerInfo
from blockrelay.redis.cell_settings import CellSettings


def _ask(pipeline: Any, keys: Keys, worker: str) -> None:
    pipeline.hgetall(keys.worker(worker))
    pipeline.exists(keys.inbox(worker))
    pipeline.scard(keys.worker_requests(worker))


def _head(pipeline: Any, keys: Keys) -> None:
    pipeline.zrange(keys.workers, 0, -1, withscores=True)
    pipeline.time()
    pipeline.hgetall(keys.settings)


def _infos(head: tuple[Any, Any, Any], answers: list[Any], model: str) -> list[WorkerInfo]:
    beats, (seconds, micros), settings = head
    now_ms, cell = seconds * 1000 + micros // 1000, CellSettings.from_redis(settings) or CellSettings()
    infos: list[WorkerInfo] = []
    for i, (worker, beat_ms) in enumerate(beats):
        fields, inbox, running = answers[3 * i : 3 * i + 3]
        if is_spoken(number_of(fields.get(b"v"))) and fields.get(b"model", b"").decode() == model:
            infos.append(
                WorkerInfo.from_redis(
                    worker.decode(),
                    fields,
                    ready=bool(inbox),
                    running=int(running),
                    silent_ms=abs(now_ms - int(beat_ms)),  # one from the future is older than the clock
                    dead_after_ms=cell.dead_after_ms,
                )
            )
    return sorted(infos, key=lambda w: (w.registered_ms, w.id))


def read_workers(client: redis.Redis, keys: Keys, model: str) -> list[WorkerInfo]:
    """Registered workers of `model`, oldest first (ready or not, alive or not). Times are the
    server's clock."""
    ask = client.pipeline(transaction=False)
    _head(ask, keys)
    head = cast(Any, ask.execute())
    for worker, _ in head[0]:
        _ask(ask, keys, worker.decode())
    return _infos(head, ask.execute(), model)


async def read_workers_async(client: redis.asyncio.Redis, keys: Keys, model: str) -> list[WorkerInfo]:
    """As `read_workers`."""
    ask = client.pipeline(transaction=False)
    _head(ask, keys)
    head = cast(Any, await ask.execute())
    for worker, _ in head[0]:
        _ask(ask, keys, worker.decode())
    return _infos(head, await ask.execute(), model)


def read_plan(client: redis.Redis, keys: Keys, model: str) -> Plan | None:
    """The plan in force, or None."""
    return Plan.from_redis(cast(Any, client.hgetall(keys.plan(model))))


async def read_plan_async(client: redis.asyncio.Redis, keys: Keys, model: str) -> Plan | None:
    """As `read_plan`."""
    return Plan.from_redis(await cast(Any, client.hgetall(keys.plan(model))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """How many requests the cell has accepted and ended (by reason) since it began, and has in flight; how many workers
    died, and how many runs were ended and queued again (by reason)."""

    accepted: int
    ended: Mapping[str, int]
    in_flight: int
    deaths: int
    reruns: Mapping[str, int]


def read_books(client: redis.Redis, keys: Keys, model: str) -> Books:
    """All of one moment: an ACCEPT between them would look like a loss."""
    ask = client.pipeline(transaction=True)
    ask.hgetall(keys.totals(model))
    ask.zcard(keys.running)
    totals, in_flight = cast(Any, ask.execute())
    counts = {name.decode(): int(count) for name, count in totals.items()}

    def by_reason(kind: str) -> dict[str, int]:
        return {name.removeprefix(kind): count for name, count in counts.items() if name.startswith(kind)}

    return Books(
        accepted=counts.get("accepted", 0),
        ended=by_reason("ended:"),
        in_flight=in_flight,
        deaths=counts.get("deaths", 0),
        reruns=by_reason("reruns:"),
    )


def read_oldest(client: redis.Redis, keys: Keys) -> tuple[str, float] | None:
    """The unfinished request that has stood still longest, and for how many seconds; None when there is none."""
    ask = client.pipeline(transaction=False)
    ask.zrange(keys.running, 0, 0, withscores=True)
    ask.time()
    found, (seconds, micros) = cast(Any, ask.execute())
    if not found:
        return None
    request, moved_ms = found[0]
    return request.decode(), max(0.0, seconds + micros / 1e6 - moved_ms / 1000)


def server_ms() -> int:
    """This host's Unix time in milliseconds. Only for fields that people read; scripts use the server's clock."""
    return int(time.time() * 1000)
