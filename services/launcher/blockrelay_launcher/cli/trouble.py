"""Finds problems in a cell for `blockrelay status`: requests without progress, lost devices, accounting, full memory.

`read_trouble` reads the facts from Redis, and `sentences` turns them into the lines with which the runbooks begin.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, cast

import redis

from blockrelay.protocol.constants import YIELD_SHARE
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.plan import WorkerInfo, slow_workers
from blockrelay.quantities import counted, format_seconds
from blockrelay.redis.registry import read_accounting, read_lost_devices, read_oldest
from blockrelay.typed_command import typed
from blockrelay_launcher.policy import REDIS_MEASUREMENTS, SLOW_REDIS_S, STILL_S


def read_trouble(client: redis.Redis, keys: Keys, workers: Mapping[str, Sequence[WorkerInfo]]) -> dict[str, Any]:
    """Reads the facts about possible problems; `workers` are the workers of each model.

    Returns `oldest` (request, seconds, state, workers) or None; by model `books` (accounting), `numerics` (numbers of
    requests that wait for a numerics id which no ready worker has) and `slow` (workers by cause); `lost_devices`
    (LostDevice); `memory` (used, limit; bytes, 0: no limit); `answer_s` (median seconds of a round trip from here to
    the control Redis). Raises RedisTrouble if Redis does not answer.
    """
    memory = client.info("memory")
    return {
        "oldest": _oldest(client, keys),
        "books": {model: asdict(read_accounting(client, keys, model)) for model in workers},
        "numerics": {model: _waiting_for_numerics(client, keys, model, there) for model, there in workers.items()},
        "slow": {model: slow_workers(there) for model, there in workers.items()},
        "lost_devices": [asdict(lost) for lost in read_lost_devices(client, keys)],
        "memory": {"used": int(memory["used_memory"]), "limit": int(memory["maxmemory"])},
        "answer_s": median(_answer_s(client) for _ in range(REDIS_MEASUREMENTS)),
    }


def sentences(trouble: Mapping[str, Any]) -> list[str]:
    """Returns one line for each problem in the result of `read_trouble`; none when all is well."""
    lines: list[str] = []
    if (oldest := trouble["oldest"]) and oldest["seconds"] >= STILL_S:
        where = f"on {', '.join(oldest['workers'])}" if oldest["workers"] else "waits for a worker"
        lines.append(f"no progress for {format_seconds(oldest['seconds'])}: {oldest['request']}, {where}")
    for accounting in trouble["books"].values():
        if missing := accounting["accepted"] - sum(accounting["ended"].values()) - accounting["in_flight"]:
            ended = ", ".join(f"{reason} {count}" for reason, count in sorted(accounting["ended"].items())) or "none"
            lines.append(
                f"the books do not balance by {missing}: {accounting['accepted']} accepted, "
                f"ended {ended}, {accounting['in_flight']} in flight"
            )
    for waiting in trouble["numerics"].values():
        lines += [
            f"waiting for a worker of numerics id {numerics}, of which none is left: {counted(count, 'request')}"
            for numerics, count in waiting.items()
        ]
    for slow in trouble["slow"].values():
        lines += [f"slow: {cause} ({', '.join(ids)})" for cause, ids in slow.items()]
    for lost in trouble["lost_devices"]:
        where = "in quarantine, tried again" if lost["quarantine"] else "tried again"
        lines.append(
            f"{lost['device']} of {lost['worker']} was lost {counted(lost['losses'], 'time')}, last for "
            f"{lost['reason']}: {where} in {format_seconds(lost['wait_s'])}, or at once by "
            f"`{typed('devices retry ' + lost['device'])}` (--data and --redis as here)"
        )
    used, limit = trouble["memory"]["used"], trouble["memory"]["limit"]
    if limit and used >= YIELD_SHARE * limit:
        lines.append(f"Redis uses {used >> 20} of {limit >> 20} MiB: ended requests are forgotten early")
    if trouble["answer_s"] >= SLOW_REDIS_S:
        lines.append(
            f"the control Redis takes {1000 * trouble['answer_s']:.0f} ms to answer, which each token waits for: "
            "see docs/observability.md"
        )
    return lines


def _answer_s(client: redis.Redis) -> float:
    sent = time.monotonic()
    client.ping()
    return time.monotonic() - sent


def _oldest(client: redis.Redis, keys: Keys) -> dict[str, Any] | None:
    """Returns the request without progress for the longest time, its state and its workers; None if none runs."""
    oldest = read_oldest(client, keys)
    if oldest is None:
        return None
    request_id, seconds_still = oldest
    state, route = cast(Any, client.hmget(keys.request(request_id), "state", "route"))
    return {
        "request": request_id,
        "seconds": seconds_still,
        "state": (state or b"").decode(),
        "workers": [name for name in (route or b"").decode().split(",") if name],
    }


def _waiting_for_numerics(client: redis.Redis, keys: Keys, model: str, workers: Sequence[WorkerInfo]) -> dict[str, int]:
    """Returns the number of requests that wait for each numerics id that no ready worker has."""
    there = {worker.numerics for worker in workers if worker.is_alive and worker.ready}
    waiting: dict[str, int] = {}
    for name in client.scan_iter(keys.pinned(model, "*", "*"), count=1000):
        numerics = cast(bytes, name).decode().rpartition(":")[2]
        if (count := client.xlen(name)) and numerics not in there:
            waiting[numerics] = waiting.get(numerics, 0) + count
    return waiting
