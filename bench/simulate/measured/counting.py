"""Counts what a real system does under a load, and the seconds of CPU that it takes."""

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

#: Seconds before a measurement that do not count in its figures.
WARM_UP_S = 2.0
#: Microseconds from which a command enters the slow log: scripts take more, and the commands that they call take less.
SLOW_US = 12
#: Seconds after which the token log of an ended request is gone: it stays a while for slow readers.
LOG_LINGERS_S = 17.0
KEYS = Keys(Settings().cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The counts of one load on one system."""

    figures: Figures
    load: Load
    seconds: float
    requests: float
    tokens: float
    """Generated tokens."""
    prompt_rows: float
    """Tokens of all prompts."""
    steps: float
    """Steps of all workers."""
    reads: float
    """Reads of logs (XREAD)."""
    reads_s: float
    """Seconds of CPU of Redis for all reads."""
    wake_s: float
    """Seconds of CPU of Redis to wake a blocked read."""
    scripts: dict[str, int]
    """Runs of each script."""
    script_s: dict[str, float]
    """Seconds of CPU of Redis for each script."""
    cpu: dict[str, float]
    """Seconds of CPU of each kind of process."""
    client_bytes: float
    redis_bytes: float
    others: float
    """Cores that other programs and other guests of the machine had meanwhile; where they are many, figures mean
    little."""
    core_wait_s: float
    """Mean seconds until a thread with something to compute gets a core."""


def measured(system: System, load: Load, seconds: float, vocabulary: int, *, scripts: bool = False) -> Counted:
    """Runs a load for `seconds` after a warm-up, until all requests are answered, and returns its counts.

    Prompts are random token ids below `vocabulary`. Counts and seconds of CPU include the warm-up; `figures` do not.
    `scripts`: also count the runs and seconds of each script, by Redis' slow log.
    """
    chance = random.Random(time.time_ns())
    warm = Driver(url=system.url, load=load, vocabulary=vocabulary, chance=chance, requests=[])
    asyncio.run(warm.run(time.monotonic() + (WARM_UP_S if scripts else 0.1)))
    if scripts:
        system.redis.config_set("slowlog-max-len", 1_000_000)
        system.redis.config_set("slowlog-log-slower-than", SLOW_US)
        system.redis.slowlog_reset()
    driver = Driver(url=system.url, load=load, vocabulary=vocabulary, chance=chance, requests=[])
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
    if scripts:  # COMMIT, by far the most frequent, gets what the other scripts leave of all calls
        others = [name for name in calls if name != "commit"]
        calls["commit"] = int(spent["evalsha"]) - sum(calls[name] for name in others)
        script_s["commit"] = spent["evalsha_s"] - sum(script_s[name] for name in others)
    return Counted(
        figures=figures(driver.requests, until - seconds, until),
        load=load,
        seconds=took,
        requests=len(driver.requests),
        tokens=sum(len(request.tokens) for request in driver.requests),
        prompt_rows=sum(request.prompt for request in driver.requests),
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
    """Measures the bytes of a stream, as the mean of `many` at once.

    Prompts are random token ids below `vocabulary`. Returns the memory of Redis for a request in flight, that for an
    ended request whose log is gone, and the gateway's memory for a stream.
    """
    load = Load(prompt=Lengths.of(32), new=Lengths.of(64), clients=many)

    async def most(clients: int) -> tuple[int, int]:
        """Runs one request of each client at once; returns the highest memory of Redis and of the gateway."""
        once = replace(load, clients=clients)
        driver = Driver(url=system.url, load=once, vocabulary=vocabulary, chance=random.Random(clients), requests=[])
        running = asyncio.ensure_future(driver.run(time.monotonic()))
        full, heavy = 0, 0
        while not running.done():
            await asyncio.sleep(0.05)
            full, heavy = max(full, _used(system)), max(heavy, system.resident_bytes("gateway"))
        await running
        return full, heavy

    asyncio.run(most(16))  # allocates what does not depend on the number of streams
    light = system.resident_bytes("gateway")
    _, heavy = asyncio.run(most(many))  # the gateway is measured the first time: its memory seldom shrinks later
    time.sleep(LOG_LINGERS_S)
    empty = _used(system)
    full, _ = asyncio.run(most(many))  # Redis is measured the second time: the buffers of connections are there by now
    time.sleep(LOG_LINGERS_S)
    return (full - empty) / many, (_used(system) - empty) / many, (heavy - light) / many


def _used(system: System) -> int:
    memory: dict[str, Any] = system.redis.info("memory")
    return int(memory["used_memory"])


def _look(system: System) -> dict[str, float]:
    """Returns the present counters of Redis and of the workers."""
    counters: dict[str, float] = {}
    stats: dict[str, Any] = system.redis.info("commandstats")
    for command in ("xadd", "xread", "expire", "evalsha"):
        entry = stats.get(f"cmdstat_{command}", {"calls": 0, "usec": 0})
        counters |= {command: entry["calls"], f"{command}_s": entry["usec"] / 1e6}
    counters["bytes"] = wire_bytes(system.redis)
    workers = registry.read_workers(system.redis, KEYS, system.model)
    totals = [read_totals(asdict(worker)) for worker in workers]
    return counters | {"steps": sum(total["inferences"] for total in totals if total)}


def _scripts(control: "redis.Redis") -> tuple[dict[str, int], dict[str, float]]:
    """Returns how often each script ran since the slow log was emptied, and its seconds, from the slow log."""
    names = {source(name).sha.encode(): name for name in NAMES}
    calls, seconds = defaultdict[str, int](int), defaultdict[str, float](float)
    entries: list[dict[str, Any]] = control.slowlog_get(-1)
    for entry in entries:
        words = entry["command"].split(b" ", 2)
        if words[0].upper() == b"EVALSHA" and (name := names.get(words[1])):
            calls[name] += 1
            seconds[name] += entry["duration"] / 1e6
    return calls, seconds
