"""Builds the plan of a cell: a split, and the worker of each of its stages. Pure: workers in, plan out.

The split does not depend on the workers, so that no death and no arrival ever moves a block.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockrelay.protocol.plan import CPU, GPU, Plan, Stage, WorkerInfo, succeeded
from blockrelay.protocol.planned_split import PlannedSplit
from blockrelay.quantities import counted
from blockrelay_scheduler.planning.assignment import assign
from blockrelay_scheduler.planning.folder_change import other_folders


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan that some workers need."""

    plan: Plan
    inputs: str
    """A hash of the workers, the split, its source, moves to empty stages, the stages on GPUs, and the workers that
    serve another block folder. While it is equal, no other plan is needed."""


def decide(
    workers: Sequence[WorkerInfo],
    *,
    planned: PlannedSplit,
    current: Plan | None,
    source: str = "",
    deserted: frozenset[int] = frozenset(),
) -> Decision:
    """Returns the plan for the registered `workers` of one model, with the epoch after that of `current`.

    `current` is the plan in force, and `source` says in words where the split `planned` comes from. `deserted` are the
    indices of stages without a live worker for so long that no replacement is expected: each gets a worker of another
    stage, if one has several. A worker that moves to another stage has the stage of its successor, and is not in the
    plan itself. One without the block folder of the plan gets no stage.
    """
    followed = succeeded(workers)
    workers = [w for w in workers if w.id not in followed and (w.stage is not None or _has(w, planned))]
    assignment = assign(workers, planned=planned, current=current, deserted=deserted)
    by_device = [_devices(workers, assignment.stages, index) for index in range(len(planned.stages))]
    on_gpus = stages_on_gpus(workers, planned.text)
    others = other_folders(workers, assignment.stages, folder=planned.folder, current=current)
    plan = Plan(
        epoch=(current.epoch if current else 0) + 1,
        split=planned.text,
        route_class=GPU if on_gpus else CPU,
        assignments=assignment.stages,
        blocks={
            f"block_{block}": "GPU" if index in on_gpus else "CPU"
            for index, stage in enumerate(planned.stages)
            for block in range(stage.first, stage.last + 1)
        },
        reasons=tuple(
            _reason(index, stage, why, devices, loads=index not in on_gpus)
            for index, (stage, why, devices) in enumerate(zip(planned.stages, planned.reasons, by_device, strict=True))
        ),
        devices=planned.devices,
        source=source,
        folder=planned.folder,
        other_folders=others,
    )
    return Decision(plan=plan, inputs=_inputs_hash(workers, planned, source, assignment.moved, on_gpus, others))


def _has(worker: WorkerInfo, planned: PlannedSplit) -> bool:
    """Returns whether a worker that has no stage yet could serve the folder of the plan, as far as it says."""
    return not worker.folders or worker.folder_with(planned.folder) is not None


def stages_on_gpus(workers: Sequence[WorkerInfo], split: str) -> frozenset[int]:
    """Returns the stages of `split` that a GPU computes now: a GPU worker has loaded them and does not drain."""
    return frozenset(
        w.stage
        for w in workers
        if w.device == GPU and w.ready and not w.draining and w.split == split and w.stage is not None
    )


def waits_for_more(current: Plan, following: Plan) -> bool:
    """Returns whether `following` moves no worker and takes no block off the GPUs, compared with `current`.

    Its split, assignments, devices and source are then the same; blocks that GPUs have loaded, and reasons, may differ.
    Such a plan may be published later, together with the stages that load next.
    """
    gone = [block for block, device in current.blocks.items() if device == "GPU" and following.blocks[block] != "GPU"]
    first, second = (
        (plan.split, plan.assignments, plan.devices, plan.source, plan.folder, plan.other_folders)
        for plan in (current, following)
    )
    return first == second and not gone


def _devices(workers: Sequence[WorkerInfo], assignments: Mapping[str, int], stage: int) -> Counter[str]:
    return Counter(w.device for w in workers if assignments.get(w.id) == stage and not w.draining)


def _reason(index: int, stage: Stage, why: str, devices: Counter[str], *, loads: bool) -> str:
    """Returns a sentence about a stage: its blocks, why it has them, and its workers.

    `devices` counts its workers by class. `loads`: none of its GPU workers is ready.
    """
    what = f"stage {index} is block_{stage.first} to block_{stage.last}, {why}"
    gpu, cpu = devices[GPU], devices[CPU]
    gpus = f"{counted(gpu, 'GPU worker')} {('loads' if gpu == 1 else 'load') if loads else 'for'} it"
    if gpu and cpu:
        stand_in = f"{counted(cpu, 'CPU worker')} stand{'s' if cpu == 1 else ''} in"
        return f"{what}: {gpus}, {stand_in}"
    if gpu:
        return f"{what}: {gpus} and no CPU worker to stand in"
    if cpu:
        return f"{what}: {counted(cpu, 'CPU worker')} for it"
    return f"{what}: no worker yet, requests wait"


def _inputs_hash(
    workers: Sequence[WorkerInfo],
    planned: PlannedSplit,
    source: str,
    moved: Mapping[str, int],
    on_gpus: frozenset[int],
    others: Mapping[str, str],
) -> str:
    """Hashes what a plan depends on: schedulers that see the same get the same hash, which PLAN publishes only once."""
    seen = sorted([w.id, w.device, w.device_id, w.draining] for w in workers)
    content = [planned.to_json(), source, seen, sorted(moved.items()), sorted(on_gpus), *([others] if others else [])]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
