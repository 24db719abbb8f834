"""What in a cell somebody should look at: who stands still, who waits for whom, books that do not balance, memory.

`read_trouble` reads, `sentences` says it; runbooks begin with these lines.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, cast

import redis

from blockrelay.protocol.keys import Keys
from blockrelay.protocol.plan import WorkerInfo, slow_workers
from blockrelay.quantities import counted, format_seconds
from blockrelay.redis.registry import read_books, read_lost_devices, read_oldest
from blockrelay.typed_command import typed

#: Seconds without progress from which on a request is told: a prompt or a queue takes less.
STILL_S = 5.0
#: Seconds for an answer of Redis from which on it is told, and how often it is asked: each commit waits for several.
SLOW_S, ASKED = 0.005, 9
#: Share of Redis' memory from which on it is told: gateways forget ended requests from here on.
FULL_SHARE = 0.5


def read_trouble(client: redis.Redis, keys: Keys, workers: Mapping[str, Sequence[WorkerInfo]]) -> dict[str, Any]:
    """As data: `oldest` (request, seconds, state, workers) or None, `books`, `numerics` (requests that wait for an id)
    and `slow` (workers by cause) by model, `lost_devices` (LostDevice), `memory` (used, limit; bytes, 0: no limit),
    `answer_s` (the median of some commands, from here to the control Redis and back). `workers` by model."""
    memory = client.info("memory")
    return {
        "oldest": _oldest(client, keys),
        "books": {model: asdict(read_books(client, keys, model)) for model in workers},
        "numerics": {model: _waiting_for_numerics(client, keys, model, there) for model, there in workers.items()},
        "slow": {model: slow_workers(there) for model, there in workers.items()},
        "lost_devices": [asdict(lost) for lost in read_lost_devices(client, keys)],
        "memory": {"used": int(memory["used_memory"]), "limit": int(memory["maxmemory"])},
        "answer_s": median(_answer_s(client) for _ in range(ASKED)),
    }


def sentences(trouble: Mapping[str, Any]) -> list[str]:
    """One line each; none when all is well."""
    lines: list[str] = []
    if (oldest := trouble["oldest"]) and oldest["seconds"] >= STILL_S:
        where = f"on {', '.join(oldest['workers'])}" if oldest["workers"] else "waits for a worker"
        lines.append(f"no progress for {format_seconds(oldest['seconds'])}: {oldest['request']}, {where}")
    for books in trouble["books"].values():
        if missing := books["accepted"] - sum(books["ended"].values()) - books["in_flight"]:
            ended = ", ".join(f"{reason} {count}" for reason, count in sorted(books["ended"].items())) or "none"
            lines.append(
                f"the books do not balance by {missing}: {books['accepted']} accepted, "
                f"ended {ended}, {books['in_flight']} in flight"
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
    if limit and used >= FULL_SHARE * limit:
        lines.append(f"Redis uses {used >> 20} of {limit >> 20} MiB: ended requests are forgotten early")
    if trouble["answer_s"] >= SLOW_S:
        lines.append(
            f"the control Redis takes {1000 * trouble['answer_s']:.0f} ms to answer, which each token waits for: "
            "see docs/slow-requests.md"
        )
    return lines


def _answer_s(client: redis.Redis) -> float:
    asked = time.monotonic()
    client.ping()
    return time.monotonic() - asked


def _oldest(client: redis.Redis, keys: Keys) -> dict[str, Any] | None:
    found = read_oldest(client, keys)
    if found is None:
        return None
    request, seconds_still = found
    state, route = cast(Any, client.hmget(keys.request(request), "state", "route"))
    return {
        "request": request,
        "seconds": seconds_still,
        "state": (state or b"").decode(),
        "workers": [name for name in (route or b"").decode().split(",") if name],
    }


def _waiting_for_numerics(client: redis.Redis, keys: Keys, model: str, workers: Sequence[WorkerInfo]) -> dict[str, int]:
    there = {worker.numerics for worker in workers if worker.is_alive and worker.ready}
    found: dict[str, int] = {}
    for name in client.scan_iter(keys.pinned(model, "*", "*"), count=1000):
        numerics = cast(bytes, name).decode().rpartition(":")[2]
        if (count := client.xlen(name)) and numerics not in there:
            found[numerics] = found.get(numerics, 0) + count
    return found
