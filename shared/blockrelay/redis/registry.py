"""Reads a cell's state: workers, the plan, the accounting of requests, and lost devices.

`model` is always the model's key in Redis. All functions with a client raise RedisTrouble.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import redis
import redis.asyncio

from blockrelay.errors import RedisRefused, WireError
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.number import is_spoken, number_of
from blockrelay.protocol.plan import Plan, WorkerInfo
from blockrelay.redis.cell_settings import CellSettings


def _ask(pipeline: Any, keys: Keys, worker_id: str) -> None:
    pipeline.hgetall(keys.worker(worker_id))
    pipeline.exists(keys.inbox(worker_id))
    pipeline.scard(keys.worker_requests(worker_id))


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
                    silent_ms=abs(now_ms - int(beat_ms)),  # one in the future is from before the clock was set back
                    dead_after_ms=cell.dead_after_ms,
                )
            )
    return sorted(infos, key=lambda w: (w.registered_ms, w.id))


def worker_ids(client: redis.Redis, keys: Keys) -> list[str]:
    """Returns the ids of all registered workers of the cell, of any model and release."""
    return [worker.decode() for worker in cast(Any, client.zrange(keys.workers, 0, -1))]


def read_workers(client: redis.Redis, keys: Keys, model: str) -> list[WorkerInfo]:
    """Returns all registered workers of `model`, oldest first, ready or not, alive or not. Times are Redis' clock.

    Leaves out workers whose records have a protocol number that this release does not speak.
    """
    pipeline = client.pipeline(transaction=False)
    _head(pipeline, keys)
    head = cast(Any, pipeline.execute())
    for worker, _ in head[0]:
        _ask(pipeline, keys, worker.decode())
    return _infos(head, pipeline.execute(), model)


async def read_workers_async(client: redis.asyncio.Redis, keys: Keys, model: str) -> list[WorkerInfo]:
    """Does what `read_workers` does, on an asyncio client."""
    pipeline = client.pipeline(transaction=False)
    _head(pipeline, keys)
    head = cast(Any, await pipeline.execute())
    for worker, _ in head[0]:
        _ask(pipeline, keys, worker.decode())
    return _infos(head, await pipeline.execute(), model)


def read_plan(client: redis.Redis, keys: Keys, model: str) -> Plan | None:
    """Returns the plan of `model` in force; None while there is none. Raises RedisRefused for a damaged one."""
    return decode_plan(keys, model, cast(Any, client.hgetall(keys.plan(model))))


async def read_plan_async(client: redis.asyncio.Redis, keys: Keys, model: str) -> Plan | None:
    """Does what `read_plan` does, on an asyncio client."""
    return decode_plan(keys, model, await cast(Any, client.hgetall(keys.plan(model))))


def decode_plan(keys: Keys, model: str, fields: Mapping[bytes, bytes]) -> Plan | None:
    """Returns the plan in the `fields` of its record; None if there is none. Raises RedisRefused for a damaged one."""
    try:
        return Plan.from_redis(fields)
    except WireError as error:
        remedy = "remove the key with DEL, and the scheduler publishes the plan again"
        raise RedisRefused(f"{keys.plan(model)} is damaged ({error}): {remedy}", code="PLAN") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """The accounting of a model in a cell: its requests, re-runs and worker deaths since the cell began."""

    accepted: int  # requests
    ended: Mapping[str, int]  # requests, by the reason of the end
    in_flight: int  # unfinished requests now, of all models of the cell
    deaths: int  # of workers
    reruns: Mapping[str, int]  # runs that were ended and queued again, by reason


def read_accounting(client: redis.Redis, keys: Keys, model: str) -> Accounting:
    """Returns the accounting of `model` at one moment: an ACCEPT between two reads would look like a lost request."""
    pipeline = client.pipeline(transaction=True)
    pipeline.hgetall(keys.totals(model))
    pipeline.zcard(keys.running)
    totals, in_flight = cast(Any, pipeline.execute())
    counts = {name.decode(): int(count) for name, count in totals.items()}

    def by_reason(kind: str) -> dict[str, int]:
        return {name.removeprefix(kind): count for name, count in counts.items() if name.startswith(kind)}

    return Accounting(
        accepted=counts.get("accepted", 0),
        ended=by_reason("ended:"),
        in_flight=in_flight,
        deaths=counts.get("deaths", 0),
        reruns=by_reason("reruns:"),
    )


def read_oldest(client: redis.Redis, keys: Keys) -> tuple[str, float] | None:
    """Returns the id of the unfinished request without progress for the longest time, and the seconds; None if none."""
    pipeline = client.pipeline(transaction=False)
    pipeline.zrange(keys.running, 0, 0, withscores=True)
    pipeline.time()
    oldest, (seconds, micros) = cast(Any, pipeline.execute())
    if not oldest:
        return None
    request_id, moved_ms = oldest[0]
    return request_id.decode(), max(0.0, seconds + micros / 1e6 - moved_ms / 1000)


#: Milliseconds after which a lost device counts as gone, because its worker has not reported it again.
_FORGOTTEN_MS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LostDevice:
    """A GPU that its worker has lost and will try again."""

    device: str  # as `--gpu` names it
    worker: str  # the node_id in the worker's log
    reason: str  # of the last loss
    losses: int  # how often the worker has lost it
    quarantine: bool  # it was lost too often of late
    wait_s: float  # seconds until the worker tries it again

    @property
    def name(self) -> str:
        """A name for the device on its worker, unique in the cell."""
        return f"{self.device} {self.worker}"


def tell_lost_device(client: redis.Redis, keys: Keys, lost: LostDevice) -> bool:
    """Publishes a lost device for 10 s. Returns whether `retry_lost_device` was called, once for each such call.

    The device's worker calls it again and again until it tries the device or ends.
    """
    pipeline = client.pipeline(transaction=True)
    pipeline.time()
    pipeline.getdel(keys.device_retry(lost.name))
    (seconds, micros), retry = cast(Any, pipeline.execute())
    fields = asdict(lost) | {"told_ms": seconds * 1000 + micros // 1000}
    client.hset(keys.lost_devices, lost.name, json.dumps(fields))
    return retry is not None


def forget_lost_device(client: redis.Redis, keys: Keys, lost: LostDevice) -> None:
    """Removes a lost device from the cell, when its worker tries it again or ends."""
    client.hdel(keys.lost_devices, lost.name)


def read_lost_devices(client: redis.Redis, keys: Keys) -> list[LostDevice]:
    """Returns the lost devices that workers have reported within the last 10 s, sorted by name."""
    pipeline = client.pipeline(transaction=False)
    pipeline.hgetall(keys.lost_devices)
    pipeline.time()
    reports, (seconds, micros) = cast(Any, pipeline.execute())
    now_ms = seconds * 1000 + micros // 1000
    devices: list[LostDevice] = []
    for _, value in sorted(reports.items()):
        fields = json.loads(value)
        if abs(now_ms - fields.pop("told_ms")) < _FORGOTTEN_MS:
            devices.append(LostDevice(**fields))
    return devices


def retry_lost_device(client: redis.Redis, keys: Keys, lost: LostDevice) -> None:
    """Makes the worker try its lost device within a second or two, in quarantine or not."""
    client.set(keys.device_retry(lost.name), 1, px=_FORGOTTEN_MS)


def server_ms() -> int:
    """Returns this host's Unix time in milliseconds, for fields that people read. Scripts use Redis' clock instead."""
    return int(time.time() * 1000)
