"""What requests and tokens cost a control Redis, its disk and a gateway: `python -m bench.scenarios.capacity`.

A real `blockrelay up` serves some loads that differ in clients, prompts and answers. Counters of Redis (`INFO`), bytes
that its process wrote (/proc/PID/io) and seconds of CPU are read before and after each, what an idle system takes is
taken off, and what is left is shared out by least squares: so much for each request, each new token, each token of a
prompt and each COMMIT. Memory is what 192 streams at once take. Printed as one JSON object, the machine with it. The
figures go, rounded, into `blockrelay_converter/sizing/measured.py`.
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

#: (clients, prompt, new). What they have in common cannot be told apart, so they have little.
LOADS = ((1, 32, 2), (1, 32, 96), (16, 32, 2), (16, 32, 96), (16, 384, 2), (4, 384, 64))
IDLE_S, AT_ONCE = 4.0, 192
#: What costs are shared out to.
CAUSES = ("request", "token", "prompt_token", "commit")
_SERVICES = ("control Redis", "gateway", "scheduler", "payload Redis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One load, or none: how many of each cause there were, and how much each counter grew."""

    seconds: float
    causes: Mapping[str, float]
    grew: Mapping[str, float]


def counters(control: "redis.Redis") -> dict[str, float]:
    """The counters of a Redis since it started: commands (those that scripts call, too), calls that services make,
    bytes of its append-only file and of its wires."""
    info: dict[str, Any] = control.info("everything")  # pyright: ignore[reportAssignmentType]
    commands = {name: about["calls"] for name, about in info.items() if name.startswith("cmdstat_")}
    return {
        "commands": info["total_commands_processed"],
        "scripts": commands.get("cmdstat_evalsha", 0),
        "reads": commands.get("cmdstat_xread", 0),
        "aof": info.get("aof_current_size", 0),
        "wire": info["total_net_input_bytes"] + info["total_net_output_bytes"],
    }


def seen(system: System, load: Load | None, seconds: float, vocabulary: int) -> Seen:
    """The growth of all counters under a load, or without one (None), and the seconds it took."""
    before, began = _look(system), time.monotonic()
    asked = []
    if load is None:
        time.sleep(seconds)
    else:
        driver = Driver(url=system.url, load=load, vocabulary=vocabulary, chance=random.Random(1), asked=[])
        asyncio.run(driver.run(began + seconds))
        asked = driver.asked
    now, took = _look(system), time.monotonic() - began
    grew = {name: now[name] - before[name] for name in now}
    causes = {
        "request": float(len(asked)),
        "token": float(sum(len(one.tokens) for one in asked)),
        "prompt_token": float(sum(one.prompt for one in asked)),
    }
    return Seen(seconds=took, causes=causes, grew=grew)


def shared_out(idle: Seen, loads: Sequence[Seen]) -> dict[str, dict[str, float]]:
    """The growth of each counter by its causes, never below 0; the cause `a second` is what an idle system does."""
    found: dict[str, dict[str, float]] = {}
    commits = _commits(idle, loads)
    causes = np.array([[*one.causes.values(), commit] for one, commit in zip(loads, commits, strict=True)])
    for name in idle.grew:
        a_second = idle.grew[name] / idle.seconds
        left = np.array([one.grew[name] - a_second * one.seconds for one in loads])
        weights = 1 / np.maximum(np.abs(left), 1e-9)  # errors count as shares
        shares = _not_negative(causes * weights[:, None], left * weights)
        said = causes @ shares
        found[name] = {
            **{cause: float(share) for cause, share in zip(CAUSES, shares, strict=True)},
            "a_second": a_second,
            "worst_error": float(np.max(np.abs(said - left) * weights)),
        }
    return found


def _commits(idle: Seen, loads: Sequence[Seen]) -> list[float]:
    """Calls of scripts beside two for each request (ACCEPT and CLAIM) are COMMIT's."""
    a_second = idle.grew["scripts"] / idle.seconds
    return [max(0.0, one.grew["scripts"] - a_second * one.seconds - 2 * one.causes["request"]) for one in loads]


def _not_negative(matrix: Any, wanted: Any) -> Any:
    """Least squares; a cause that would come out below 0 has 0."""
    columns = list(range(matrix.shape[1]))
    while columns:
        shares = np.linalg.lstsq(matrix[:, columns], wanted, rcond=None)[0]
        if (shares >= 0).all():
            break
        columns.pop(int(np.argmin(shares)))
    else:
        return np.zeros(matrix.shape[1])
    whole = np.zeros(matrix.shape[1])
    whole[columns] = shares
    return whole


def memory(system: System, vocabulary: int, prompt: int, new: int) -> dict[str, float]:
    """Bytes of each of AT_ONCE streams: of the control Redis under way and ended, and of the gateway."""
    load = Load(prompt=Lengths.of(prompt), new=Lengths.of(new), clients=AT_ONCE)

    async def most() -> tuple[int, int]:
        driver = Driver(url=system.url, load=load, vocabulary=vocabulary, chance=random.Random(1), asked=[])
        under_way = asyncio.ensure_future(driver.run(time.monotonic()))
        full, heavy = 0, 0
        while not under_way.done():
            await asyncio.sleep(0.05)
            full, heavy = max(full, _used(system)), max(heavy, system.resident_bytes("gateway"))
        await under_way
        return full, heavy

    light = system.resident_bytes("gateway")
    _, heavy = asyncio.run(most())
    time.sleep(LOG_LINGERS_S)
    empty = _used(system)
    full, _ = asyncio.run(most())
    time.sleep(LOG_LINGERS_S)
    ended = _used(system) - empty
    found = {"redis_under_way": full - empty, "redis_ended": ended, "gateway": heavy - light}
    return {name: value / AT_ONCE for name, value in found.items()} | {"gateway_alone": float(light)}


def _used(system: System) -> int:
    about: dict[str, Any] = system.redis.info("memory")  # pyright: ignore[reportAssignmentType]
    return int(about["used_memory"])


def _look(system: System) -> dict[str, float]:
    found = counters(system.redis)
    (pid,) = system.pids["control Redis"]
    io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    debug: dict[str, Any] = system.redis.info("debug")  # pyright: ignore[reportAssignmentType]
    spent = system.cpu_s()
    return {
        **found,
        "disk": float(io["write_bytes"]),
        "aof_s": debug.get("eventloop_duration_aof_sum", 0) / 1e6,
        **{f"cpu {kind}": spent[kind] for kind in _SERVICES},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--seconds", type=float, default=8.0)
    chosen = parser.parse_args(arguments)
    vocabulary = open_block_folder(chosen.model, blocks=[]).model.vocab_size
    with running(chosen.model) as system:
        seen(system, Load(prompt=Lengths.of(32), new=Lengths.of(32), clients=16), WARM_UP_S, vocabulary)
        idle = seen(system, None, IDLE_S, vocabulary)
        loads = [
            seen(system, Load(prompt=Lengths.of(p), new=Lengths.of(n), clients=c), chosen.seconds, vocabulary)
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
