"""Measures how long strategy `auto` takes: `python -m bench.scenarios.plan_time`.

Prints CPU milliseconds of a plan for 33 blocks on 8 devices of 3 classes, and for 64 blocks on 16 devices of 4 classes,
none of which has room for the whole model: for both objectives, without links, with equal and with different links.
"""

import time
from collections.abc import Sequence
from itertools import combinations

from blockrelay.block_folder.analysis import BlockCost, ModelAnalysis
from blockrelay.block_folder.model import Precision
from blockrelay.planning.devices import Device, DeviceLink, Fleet
from blockrelay.planning.profile import BlockProfile, Hop, Profile
from blockrelay_scheduler.planning.cost_model import CostModel
from blockrelay_scheduler.planning.problem import Objective, Problem, Promise
from blockrelay_scheduler.planning.strategies.optimal.auto import auto

#: Seconds of a block for 1 and for 64 rows, by class of device.
TIMES = {"CPU": (0.010, 0.200), "GPU": (0.002, 0.010), "NPU": (0.004, 0.030), "APU": (0.006, 0.050)}
BLOCK_BYTES, KV_VALUES = 100_000_000, 1024
PROMISE = Promise(context=2048, requests=16)
RUNS = 3


def problem(blocks: int, devices: int, classes: int, links: str, objective: Objective) -> Problem:
    """Returns a planning problem whose devices each have memory for 1.4 times an equal share of the model.

    The model has `blocks` blocks, and the `devices` devices are of `classes` classes.
    """
    size: dict[Precision, int] = {"w8a8": BLOCK_BYTES}
    analysis = ModelAnalysis(
        model="made-up",
        context=PROMISE.context,
        blocks=tuple(
            BlockCost(
                index=index, layers=1, parameters=BLOCK_BYTES, bytes=size, step_bytes=size, attention_flops=0,
                flops_per_row=2 * BLOCK_BYTES, kv_values_per_token=KV_VALUES, hop_bytes_per_row=16384,
            )
            for index in range(1, blocks + 1)
        ),
    )  # fmt: skip
    names = list(TIMES)[:classes]
    profile = Profile(
        blocks={
            block.name: {name: BlockProfile(seconds={1: one, 64: many}) for name, (one, many) in TIMES.items()}
            for block in analysis.blocks
        },
        hop={"redis": Hop(seconds=1e-3, seconds_per_byte=2e-9)},
    )
    costs = CostModel(analysis, ("w8a8",) * blocks, profile)
    whole = blocks * (BLOCK_BYTES + 2 * KV_VALUES * PROMISE.context * PROMISE.requests)
    fleet = tuple(
        Device(id=f"d{at}", device_class=names[at % classes], host=f"h{at}", memory_bytes=int(1.4 * whole / devices))
        for at in range(devices)
    )
    return Problem(
        analysis=analysis,
        fleet=Fleet(devices=fleet, links=linked(fleet, links)),
        costs=costs,
        objective=objective,
        promise=PROMISE,
    )


def linked(devices: Sequence[Device], links: str) -> tuple[DeviceLink, ...]:
    """Returns the links between all hosts: none, all equal, or five different kinds ("differ")."""
    if links == "none":
        return ()
    return tuple(
        DeviceLink(
            between=(a.host, b.host), seconds=2e-4 * (1 + (at % 5 if links == "differ" else 0)), seconds_per_byte=1e-9
        )
        for at, (a, b) in enumerate(combinations(devices, 2))
    )


def main() -> None:
    """Prints the times."""
    sizes = ((33, 8, 3, ("none", "equal", "differ")), (64, 16, 4, ("none", "equal")))
    for blocks, devices, classes, ways in sizes:
        for links in ways:
            for objective in ("latency", "throughput"):
                one = problem(blocks, devices, classes, links, objective)
                seconds = [cpu_s(one) for _ in range(RUNS)]
                print(
                    f"{blocks} blocks, {devices} devices of {classes} classes, links {links:6}, {objective:10} "
                    f"{1000 * min(seconds):6.0f} ms"
                )


def cpu_s(problem: Problem) -> float:
    """Plans a problem, and returns the CPU seconds that it took."""
    started = time.process_time()
    auto(problem)
    return time.process_time() - started


if __name__ == "__main__":
    main()
