"""What a real system does under a load, how often, and what it costs."""

import asyncio
import random
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any

import redis

from bench.busy import host_busy_s
from bench.simulate.load import Figures, Lengths, Load, figures
from bench.simulate.measured.driving import Driver, System, wire_bytes
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.transitions.source import NAMES, source
from blockrelay.redis import registry
from blockrelay.settings import Settings
from blockrelay_launcher.cli.worker_totals import read_totals

#: Seconds before a measurement that are not counted.
WARM_UP_S = 2.0
#: Commands that scripts call take less, in microseconds, and are not worth a line in the slow log; a script takes more.
SLOW_US = 12
#: A log is there for the slowest reader after its end; longer than that. Seconds.
LOG_LINGERS_S = 17.0
KEYS = Keys(Settings().cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One load on one system: how often things were done, and seconds of CPU by kind of process (`cpu`) and of Redis by
    script (`script_s`), for all its reads (`reads_s`) and for one wake of a reader (`wake_s`)."""

    figures: Figures
    load: Load
    seconds: float
    requests: float
    tokens: float
    prompt_rows: float
    steps: float
    reads: float
    reads_s: float
    wake_s: float
    scripts: dict[str, int]
    script_s: dict[str, float]
    cpu: dict[str, float]
    client_bytes: float
    redis_bytes: float
    #: Cores that somebody else had meanwhile, other guests of the machine included: a figure beside many means little.
    others: float
    #: Seconds until a thread that has something to do gets a core, the mean.
    core_wait_s: float


def measured(system: System, load: Load, seconds: float, vocabulary: int, *, scripts: bool = False) -> Counted:
    """The load for some seconds behind a warm-up, until all is answered. CPU and counts are of all of it, figures of
    what came behind the warm-up."""
    chance = random.Random(time.time_ns())
    warm = Driver(url=system.url, load=load, vocabulary=vocabulary, chance=chance, asked=[])
    asyncio.run(warm.run(time.monotonic() + (WARM_UP_S if scripts else 0.1)))
    if scripts:
        system.redis.config_set("slowlog-max-len", 1_000_000)
        system.redis.config_set("slowlog-log-slower-than", SLOW_US)
        system.redis.slowlog_reset()
    driver = Driver(url=system.url, load=load, vocabulary=vocabulary, chance=chance, asked=[])
    before, began = _look(system), time.monotonic()
    busy = host_busy_s()
    waited_before, turns_before = system.core_waits()
    before_cpu = {**system.cpu_s(), "client": time.process_time()}
    until = began + WARM_UP_S + seconds
    asyncio.run(driver.run(until))
    after_cpu, took = {**system.cpu_s(), "client": time.process_time()}, time.monotonic() - began
    waited, turns = system.core_waits()
    ours = sum(after_cpu.values()) - sum(before_cpu.values())
    now = _look(system)
    spent = {name: now[name] - before.get(name, 0.0) for name in now}
    calls, script_s = _scripts(system.redis) if scripts else ({}, {})
    system.redis.config_set("slowlog-log-slower-than", -1)
    if scripts:  # COMMIT is by far the most often: what the others leave of all
        others = [name for name in calls if name != "commit"]
        calls["commit"] = int(spent["evalsha"]) - sum(calls[name] for name in others)
        script_s["commit"] = spent["evalsha_s"] - sum(script_s[name] for name in others)
    return Counted(
        figures=figures(driver.asked, until - seconds, until),
        load=load,
        seconds=took,
        requests=len(driver.asked),
        tokens=sum(len(asked.tokens) for asked in driver.asked),
        prompt_rows=sum(asked.prompt for asked in driver.asked),
        steps=spent["steps"],
        reads=spent["xread"],
        reads_s=spent["xread_s"],
        wake_s=spent["xadd_s"] / max(1.0, spent["xadd"]) + spent["expire_s"] / max(1.0, spent["expire"]),
        scripts=dict(calls),
        script_s=dict(script_s),
        cpu={kind: seconds - before_cpu[kind] for kind, seconds in after_cpu.items()},
        client_bytes=driver.received_bytes,
        redis_bytes=spent["bytes"],
        core_wait_s=(waited - waited_before) / max(1.0, turns - turns_before),
        others=max(0.0, (host_busy_s() - busy - ours) / took),
    )


def footprint(system: System, vocabulary: int, many: int = 192) -> tuple[float, float, float]:
    """Bytes for each of so many streams: of Redis while it is under way and once it has ended and its log lingers no
    more, and of the gateway's memory."""
    load = Load(prompt=Lengths.of(32), new=Lengths.of(64), clients=many)

    async def most(clients: int) -> tuple[int, int]:
        """All begin at once, and none follows them; the most that is seen of Redis and of the gateway."""
        few = replace(load, clients=clients)
        driver = Driver(url=system.url, load=few, vocabulary=vocabulary, chance=random.Random(clients), asked=[])
        running = asyncio.ensure_future(driver.run(time.monotonic()))
        full, heavy = 0, 0
        while not running.done():
            await asyncio.sleep(0.05)
            full, heavy = max(full, _used(system)), max(heavy, system.resident_bytes("gateway"))
        await running
        return full, heavy

    asyncio.run(most(16))  # what is there once is there
    light = system.resident_bytes("gateway")
    _, heavy = asyncio.run(most(many))  # memory of a process seldom shrinks: the first time tells
    time.sleep(LOG_LINGERS_S)
    empty = _used(system)
    full, _ = asyncio.run(most(many))  # buffers of connections stay: the second time tells
    time.sleep(LOG_LINGERS_S)
    return (full - empty) / many, (_used(system) - empty) / many, (heavy - light) / many


def _used(system: System) -> int:
    memory: dict[str, Any] = system.redis.info("memory")
    return int(memory["used_memory"])


def _look(system: System) -> dict[str, float]:
    """Counters of Redis and of the workers, as they stand."""
    found: dict[str, float] = {}
    stats: dict[str, Any] = system.redis.info("commandstats")
    for command in ("xadd", "xread", "expire", "evalsha"):
        about = stats.get(f"cmdstat_{command}", {"calls": 0, "usec": 0})
        found |= {command: about["calls"], f"{command}_s": about["usec"] / 1e6}
    found["bytes"] = wire_bytes(system.redis)
    workers = registry.read_workers(system.redis, KEYS, system.model)
    totals = [read_totals(asdict(worker)) for worker in workers]
    return found | {"steps": sum(total["inferences"] for total in totals if total)}


def _scripts(control: "redis.Redis") -> tuple[dict[str, int], dict[str, float]]:
    """How often each script ran since the slow log was emptied, and its seconds."""
    names = {source(name).sha.encode(): name for name in NAMES}
    calls, seconds = defaultdict[str, int](int), defaultdict[str, float](float)
    entries: list[dict[str, Any]] = control.slowlog_get(-1)
    for entry in entries:
        words = entry["command"].split(b" ", 2)
        if words[0].upper() == b"EVALSHA" and (name := names.get(words[1])):
            calls[name] += 1
            seconds[name] += entry["duration"] / 1e6
    return calls, seconds
