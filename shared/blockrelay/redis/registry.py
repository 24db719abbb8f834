"""Reading what a cell tells of itself: one definition of "who is there", sync and async, the plan, and the books."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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


#: A lost device of which its worker has told nothing for so long has a worker no more. Milliseconds.
_FORGOTTEN_MS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LostDevice:
    """A GPU, as `--gpu` names it, that its `worker` (the node_id of its log) has lost so many times, last for this
    `reason`, and tries again in `wait_s` seconds; in `quarantine` after too many of late."""

    device: str
    worker: str
    reason: str
    losses: int
    quarantine: bool
    wait_s: float

    @property
    def name(self) -> str:
        """Of the device on its worker; nobody else's."""
        return f"{self.device} {self.worker}"


def tell_lost_device(client: redis.Redis, keys: Keys, lost: LostDevice) -> bool:
    """To whoever asks for it with `read_lost_devices`, for some seconds. Answer: whether somebody wants it tried now;
    that is asked once."""
    ask = client.pipeline(transaction=True)
    ask.time()
    ask.getdel(keys.device_retry(lost.name))
    (seconds, micros), wanted = cast(Any, ask.execute())
    told = asdict(lost) | {"told_ms": seconds * 1000 + micros // 1000}
    client.hset(keys.lost_devices, lost.name, json.dumps(told))
    return wanted is not None


def forget_lost_device(client: redis.Redis, keys: Keys, lost: LostDevice) -> None:
    """It is tried again, or its worker ends."""
    client.hdel(keys.lost_devices, lost.name)


def read_lost_devices(client: redis.Redis, keys: Keys) -> list[LostDevice]:
    """Those whose workers wait for them, by name."""
    ask = client.pipeline(transaction=False)
    ask.hgetall(keys.lost_devices)
    ask.time()
    told, (seconds, micros) = cast(Any, ask.execute())
    now_ms = seconds * 1000 + micros // 1000
    found: list[LostDevice] = []
    for _, value in sorted(told.items()):
        fields = json.loads(value)
        if abs(now_ms - fields.pop("told_ms")) < _FORGOTTEN_MS:
            found.append(LostDevice(**fields))
    return found


def retry_lost_device(client: redis.Redis, keys: Keys, lost: LostDevice) -> None:
    """Have its worker try it within a second or two, quarantine or not."""
    client.set(keys.device_retry(lost.name), 1, px=_FORGOTTEN_MS)


def server_ms() -> int:
    """This host's Unix time in milliseconds. Only for fields that people read; scripts use the server's clock."""
    return int(time.time() * 1000)
