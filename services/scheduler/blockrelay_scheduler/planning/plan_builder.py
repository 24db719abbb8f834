"""The plan of equal parts. Pure: workers in, plan out.

The split depends on the number of blocks and stages alone, so that no death and no arrival ever moves a block.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockrelay.protocol.plan import Plan, Stage, WorkerInfo, split_text, uniform_split
from blockrelay_scheduler.planning.assignment import assign


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan that these workers need, and the hash of everything it was decided from except the plan before it."""

    plan: Plan
    inputs: str


def decide(
    workers: Sequence[WorkerInfo],
    *,
    blocks: int,
    stages: int,
    current: Plan | None,
    deserted: frozenset[int] = frozenset(),
) -> Decision:
    """The plan for the registered `workers` of one model. `current` is the plan in force; the epoch is the one after.

    Who runs which stage, and what `deserted` means: `assignment.assign`.
    """
    split = uniform_split(blocks, stages)
    text = split_text(split)
    assignment = assign(workers, split=text, stages=stages, current=current, deserted=deserted)
    by_device = [_devices(workers, assignment.stages, index) for index in range(stages)]
    plan = Plan(
        epoch=(current.epoch if current else 0) + 1,
        split=text,
        route_class="gpu" if any(devices["gpu"] for devices in by_device) else "cpu",
        assignments=assignment.stages,
        blocks={
            f"block_{block}": "GPU" if devices["gpu"] else "CPU"
            for stage, devices in zip(split, by_device, strict=True)
            for block in range(stage.first, stage.last + 1)
        },
        reasons=tuple(
            _reason(index, stage, devices, blocks, stages)
            for index, (stage, devices) in enumerate(zip(split, by_device, strict=True))
        ),
    )
    return Decision(plan=plan, inputs=_inputs_hash(workers, blocks, stages, assignment.moved))


def _devices(workers: Sequence[WorkerInfo], assignments: Mapping[str, int], stage: int) -> Counter[str]:
    return Counter(w.device for w in workers if assignments.get(w.id) == stage and not w.draining)


def _reason(index: int, stage: Stage, devices: Counter[str], blocks: int, stages: int) -> str:
    what = f"stage {index} is block_{stage.first} to block_{stage.last}, "
    size = stage.last - stage.first + 1
    what += "the whole model" if stages == 1 else f"{size} of {blocks} blocks in {stages} equal parts"
    gpu, cpu = devices["gpu"], devices["cpu"]
    if gpu and cpu:
        return (
            f"{what}: {_count(gpu, 'GPU worker')} for it, {_count(cpu, 'CPU worker')} stand{'s' if cpu == 1 else ''} in"
        )
    if gpu:
        return f"{what}: {_count(gpu, 'GPU worker')} for it and no CPU worker to stand in"
    if cpu:
        return f"{what}: {_count(cpu, 'CPU worker')} for it"
    return f"{what}: no worker yet, requests wait"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _inputs_hash(workers: Sequence[WorkerInfo], blocks: int, stages: int, moved: Mapping[str, int]) -> str:
    """Two schedulers that see the same workers have the same hash; PLAN publishes a hash once."""
    content = [blocks, stages, sorted([w.id, w.device, w.draining] for w in workers), sorted(moved.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
