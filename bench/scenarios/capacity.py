"""Measures what requests and tokens cost a control Redis, its disk and a gateway: `python -m bench.scenarios.capacity`.

A real `blockrelay up` serves some loads that differ in clients, prompts and answers. Counters of Redis (`INFO`), bytes
that its process wrote (/proc/PID/io) and seconds of CPU are read before and after each. The growth in an idle system is
subtracted, and the rest is divided by least squares among requests, new tokens, tokens of prompts and COMMITs. The
memory is that of 192 streams at once. The figures are printed as JSON objects, and go, rounded, into
`blockrelay_converter/sizing/measured.py`.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import redis

from bench.simulate.load import Lengths, Load
from bench.simulate.measured.counting import LOG_LINGERS_S, WARM_UP_S
from bench.simulate.measured.driving import Driver, System, running
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.settings import BUNDLED_MODEL

#: (clients, prompt, new) of each load. They have little in common, so that least squares can tell the causes apart.
LOADS = ((1, 32, 2), (1, 32, 96), (16, 32, 2), (16, 32, 96), (16, 384, 2), (4, 384, 64))
IDLE_S, AT_ONCE = 4.0, 192
#: The causes among which costs are divided.
CAUSES = ("request", "token", "prompt_token", "commit")
_SERVICES = ("control Redis", "gateway", "scheduler", "payload Redis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The growth of counters under one load, or in an idle system."""

    seconds: float
    causes: Mapping[str, float]
    """The number of requests, tokens and so on."""
    grew: Mapping[str, float]
    """The growth of each counter."""


def counters(control: "redis.Redis") -> dict[str, float]:
    """Returns the counters of a Redis since it started.

    `commands` includes those that scripts call; `scripts` and `reads` are calls of services. `aof` is the bytes of its
    append-only file, and `wire` the bytes that it received and sent.
    """
    info: dict[str, Any] = control.info("everything")  # pyright: ignore[reportAssignmentType]
    commands = {name: entry["calls"] for name, entry in info.items() if name.startswith("cmdstat_")}
    return {
        "commands": info["total_commands_processed"],
        "scripts": commands.get("cmdstat_evalsha", 0),
        "reads": commands.get("cmdstat_xread", 0),
        "aof": info.get("aof_current_size", 0),
        "wire": info["total_net_input_bytes"] + info["total_net_output_bytes"],
    }


def measure_growth(system: System, load: Load | None, seconds: float, vocabulary: int) -> Growth:
    """Runs a load for `seconds` (None: waits without one), and returns the growth of all counters.

    Prompts are random token ids below `vocabulary`.
    """
    before, began = _look(system), time.monotonic()
    requests = []
    if load is None:
        time.sleep(seconds)
    else:
        driver = Driver(url=system.url, load=load, vocabulary=vocabulary, chance=random.Random(1), requests=[])
        asyncio.run(driver.run(began + seconds))
        requests = driver.requests
    now, took = _look(system), time.monotonic() - began
    grew = {name: now[name] - before[name] for name in now}
    causes = {
        "request": float(len(requests)),
        "token": float(sum(len(one.tokens) for one in requests)),
        "prompt_token": float(sum(one.prompt for one in requests)),
    }
    return Growth(seconds=took, causes=causes, grew=grew)


def shared_out(idle: Growth, loads: Sequence[Growth]) -> dict[str, dict[str, float]]:
    """Returns the growth of each counter for each cause, never below 0.

    `a_second` is the growth per second of an idle system, and `worst_error` the largest relative error.
    """
    costs: dict[str, dict[str, float]] = {}
    commits = _commits(idle, loads)
    causes = np.array([[*one.causes.values(), commit] for one, commit in zip(loads, commits, strict=True)])
    for name in idle.grew:
        a_second = idle.grew[name] / idle.seconds
        left = np.array([one.grew[name] - a_second * one.seconds for one in loads])
        weights = 1 / np.maximum(np.abs(left), 1e-9)  # relative errors count
        shares = _not_negative(causes * weights[:, None], left * weights)
        predicted = causes @ shares
        costs[name] = {
            **{cause: float(share) for cause, share in zip(CAUSES, shares, strict=True)},
            "a_second": a_second,
            "worst_error": float(np.max(np.abs(predicted - left) * weights)),
        }
    return costs


def _commits(idle: Growth, loads: Sequence[Growth]) -> list[float]:
    """Returns the COMMITs of each load: all calls of scripts except two for each request (ACCEPT and CLAIM)."""
    a_second = idle.grew["scripts"] / idle.seconds
    return [max(0.0, one.grew["scripts"] - a_second * one.seconds - 2 * one.causes["request"]) for one in loads]


def _not_negative(matrix: Any, target: Any) -> Any:
    """Solves matrix x = target by least squares; unknowns that would be below 0 are 0."""
    columns = list(range(matrix.shape[1]))
    while columns:
        shares = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
        if (shares >= 0).all():
            break
        columns.pop(int(np.argmin(shares)))
    else:
        return np.zeros(matrix.shape[1])
    whole = np.zeros(matrix.shape[1])
    whole[columns] = shares
    return whole


def memory(system: System, vocabulary: int, prompt: int, new: int) -> dict[str, float]:
    """Measures the bytes of each of AT_ONCE streams: in the control Redis in flight and ended, and in the gateway.

    Each has a prompt of `prompt` random token ids below `vocabulary` and generates `new` tokens. `gateway_alone` is the
    memory of a gateway without streams.
    """
    load = Load(prompt=Lengths.of(prompt), new=Lengths.of(new), clients=AT_ONCE)

    async def most() -> tuple[int, int]:
        """Runs all streams once; returns the highest memory of Redis and of the gateway."""
        driver = Driver(url=system.url, load=load, vocabulary=vocabulary, chance=random.Random(1), requests=[])
        driving = asyncio.ensure_future(driver.run(time.monotonic()))
        full, heavy = 0, 0
        while not driving.done():
            await asyncio.sleep(0.05)
            full, heavy = max(full, _used(system)), max(heavy, system.resident_bytes("gateway"))
        await driving
        return full, heavy

    light = system.resident_bytes("gateway")
    _, heavy = asyncio.run(most())
    time.sleep(LOG_LINGERS_S)
    empty = _used(system)
    full, _ = asyncio.run(most())
    time.sleep(LOG_LINGERS_S)
    ended = _used(system) - empty
    sizes = {"redis_under_way": full - empty, "redis_ended": ended, "gateway": heavy - light}
    return {name: value / AT_ONCE for name, value in sizes.items()} | {"gateway_alone": float(light)}


def _used(system: System) -> int:
    info: dict[str, Any] = system.redis.info("memory")  # pyright: ignore[reportAssignmentType]
    return int(info["used_memory"])


def _look(system: System) -> dict[str, float]:
    """Returns all counters: of Redis, of its disk, and seconds of CPU of each service."""
    redis_counters = counters(system.redis)
    (pid,) = system.pids["control Redis"]
    io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    debug: dict[str, Any] = system.redis.info("debug")  # pyright: ignore[reportAssignmentType]
    spent = system.cpu_s()
    return {
        **redis_counters,
        "disk": float(io["write_bytes"]),
        "aof_s": debug.get("eventloop_duration_aof_sum", 0) / 1e6,
        **{f"cpu {kind}": spent[kind] for kind in _SERVICES},
    }


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the figures, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="block folder; default: the bundled model")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each load")
    chosen = parser.parse_args(arguments)
    vocabulary = open_block_folder(chosen.model, blocks=[]).model.vocab_size
    with running(chosen.model) as system:
        measure_growth(system, Load(prompt=Lengths.of(32), new=Lengths.of(32), clients=16), WARM_UP_S, vocabulary)
        idle = measure_growth(system, None, IDLE_S, vocabulary)
        loads = [
            measure_growth(system, Load(prompt=Lengths.of(p), new=Lengths.of(n), clients=c), chosen.seconds, vocabulary)
            for c, p, n in LOADS
        ]
        raw = [{**one.causes, **one.grew, "seconds": one.seconds} for one in (idle, *loads)]
        resident = {kind: system.resident_bytes(kind) for kind in system.pids}
    print(json.dumps({"costs": shared_out(idle, loads), "raw": raw, "resident": resident}, indent=1), flush=True)
    with running(chosen.model) as system:
        streams = {f"{prompt}+{new}": memory(system, vocabulary, prompt, new) for prompt, new in ((32, 64), (384, 64))}
    print(json.dumps({"memory": streams}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
