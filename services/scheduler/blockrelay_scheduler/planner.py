"""Which blocks form which stage and which worker runs which stage. Pure: workers in, plan out.

The split is uniform and depends on the number of blocks and stages alone, so that no death and no arrival ever moves a
block. A worker keeps its stage for life; a newcomer goes where its device class and numerics id are thinnest. Only a
stage that stays empty although others have workers to spare gets one of those; it drains and comes back as a newcomer.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockrelay.protocol.plan import Plan, Stage, WorkerInfo, split_text, uniform_split


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

    `deserted` are stages that had no live worker for so long that no replacement is to be expected.

    Every worker has a stage, except one that drains before it ever got one. Assignments of `current` stay while the
    split is the same. A worker that has no record any more has no assignment.
    """
    split = uniform_split(blocks, stages)
    text = split_text(split)
    kept = _kept(workers, text, current)
    moved = _moved(workers, stages, kept, deserted)
    kept |= moved
    assignments = _with_newcomers(workers, stages, kept)
    by_device = [_devices(workers, assignments, index) for index in range(stages)]
    plan = Plan(
        epoch=(current.epoch if current else 0) + 1,
        split=text,
        route_class="gpu" if any(devices["gpu"] for devices in by_device) else "cpu",
        assignments=assignments,
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
    return Decision(plan=plan, inputs=_inputs_hash(workers, blocks, stages, moved))


def _kept(workers: Sequence[WorkerInfo], split: str, current: Plan | None) -> dict[str, int]:
    """Stages that are settled: by the plan in force, or by what the worker has already loaded."""
    planned: Mapping[str, int] = current.assignments if current and current.split == split else {}
    kept: dict[str, int] = {}
    for worker in workers:
        if worker.id in planned:
            kept[worker.id] = planned[worker.id]
        elif worker.stage is not None and worker.split == split:
            kept[worker.id] = worker.stage
    return kept


def empty_stages(workers: Sequence[WorkerInfo], plan: Plan) -> frozenset[int]:
    """Stages of the plan to which no worker that still beats belongs."""
    staffed = {plan.assignments[w.id] for w in workers if w.id in plan.assignments and _serves(w)}
    return frozenset(range(len(plan.reasons))) - staffed


def _moved(
    workers: Sequence[WorkerInfo], stages: int, kept: Mapping[str, int], deserted: frozenset[int]
) -> dict[str, int]:
    """For each deserted stage the youngest worker of the best-staffed stage, if that one keeps another."""
    moved: dict[str, int] = {}
    for empty in sorted(deserted):
        staff: dict[int, list[WorkerInfo]] = {s: [] for s in range(stages)}
        for worker in sorted(workers, key=lambda w: (w.registered_ms, w.id)):
            if worker.id in kept and worker.id not in moved and _serves(worker):
                staff[kept[worker.id]].append(worker)
        best = max(staff, key=lambda s: (len(staff[s]), -s))
        if not staff[empty] and len(staff[best]) > 1:
            moved[staff[best][-1].id] = empty
    return moved


def _serves(worker: WorkerInfo) -> bool:
    return not worker.draining and not worker.is_late


def _with_newcomers(workers: Sequence[WorkerInfo], stages: int, kept: Mapping[str, int]) -> dict[str, int]:
    """`kept` plus a stage for everybody else, oldest first: the one with the fewest workers of the same kind."""
    assignments = dict(kept)
    counts = Counter((_kind(w), kept[w.id]) for w in workers if w.id in kept and _serves(w))
    for worker in sorted(workers, key=lambda w: (w.registered_ms, w.id)):
        if worker.id in kept or worker.draining:
            continue
        stage = min(range(stages), key=lambda s: (counts[_kind(worker), s], s))
        assignments[worker.id] = stage
        counts[_kind(worker), stage] += 1
    return assignments


def _kind(worker: WorkerInfo) -> tuple[str, str]:
    """Workers of different numerics ids never share a route, so each numerics id needs workers at every stage."""
    return worker.device, worker.numerics


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
