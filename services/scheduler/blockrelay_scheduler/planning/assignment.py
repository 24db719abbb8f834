"""Assigns workers to the stages of a split. Pure.

A worker keeps its stage for life; one that another plan moves has a successor, which gets the stage. A newcomer goes to
a stage that names its device or class, else to one that names none. Among these it goes where workers of its device
class and numerics id are fewest. A CPU worker stands in where GPUs are named. Only a stage that stays empty although
others have workers to spare gets one of those.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockrelay.protocol.plan import GPU, Plan, WorkerInfo, parse_split
from blockrelay.protocol.planned_split import ANY_CPU, ANY_GPU, PlannedSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The stages of workers."""

    stages: Mapping[str, int]
    """Stage index (from 0) by worker id."""
    moved: Mapping[str, int]
    """The part of `stages` whose workers leave another stage for a deserted one."""


def assign(
    workers: Sequence[WorkerInfo],
    *,
    planned: PlannedSplit,
    current: Plan | None,
    deserted: frozenset[int] = frozenset(),
) -> Assignment:
    """Returns a stage for every worker, with two exceptions.

    A worker that drains before it ever got a stage has none, nor has one that can only run the whole model where there
    are several stages. Assignments of the plan in force, `current`, stay while there are as many stages, so that few
    blocks move, except where `planned` now has the worker's device at other stages. A worker outside `current` that has
    already loaded a stage of this split keeps it likewise. `deserted` are stages without a live worker for so long that
    no replacement is to be expected.
    """
    if len(planned.stages) > 1:
        workers = [worker for worker in workers if not worker.whole_model_only]
    kept = _kept(workers, planned, current)
    moved = _moved(workers, len(planned.stages), kept, deserted)
    return Assignment(stages=_with_newcomers(workers, planned, {**kept, **moved}, deserted), moved=moved)


def empty_stages(workers: Sequence[WorkerInfo], plan: Plan) -> frozenset[int]:
    """Returns the stages of the plan without a worker that sends heartbeats and does not drain."""
    served = {plan.assignments[w.id] for w in workers if w.id in plan.assignments and _serves(w)}
    return frozenset(range(len(plan.reasons))) - served


def _kept(workers: Sequence[WorkerInfo], planned: PlannedSplit, current: Plan | None) -> dict[str, int]:
    """Returns the stages that workers keep: by the plan in force, or because they have already loaded the blocks."""
    split = planned.text
    same = current is not None and len(parse_split(current.split)) == len(planned.stages)
    before: Mapping[str, int] = current.assignments if current and same else {}
    renamed = bool(current) and [*map(list, current.devices)] != [*map(list, planned.devices)]
    kept: dict[str, int] = {}
    for worker in workers:
        stage = before.get(worker.id, before.get(worker.succeeds, worker.stage if worker.split == split else None))
        if stage is not None and not (renamed and stage not in _stages_for(worker, planned)):
            kept[worker.id] = stage
    return kept


def _stages_for(worker: WorkerInfo, planned: PlannedSplit) -> Sequence[int]:
    """Returns the stages that a worker may get.

    They are the stages that name its device, else those that name its class, else those that name none, else all. CPU
    workers whose device is not named may also get the stages of GPUs, where they stand in.
    """
    on_gpu, devices, for_gpus = worker.device == GPU, planned.devices, planned.for_gpus
    named = [
        stage
        for stage, (ids, name) in enumerate(zip(devices, planned.told_classes, strict=True))
        if worker.device_id and worker.device_id in ids and (not name or for_gpus[stage] == on_gpu)
    ]
    free = [stage for stage, ids in enumerate(devices) if not ids]
    if not on_gpu:
        if named or not (open_to := [*free, *(stage for stage, ids in enumerate(devices) if ANY_CPU in ids)]):
            return named or range(len(devices))
        return sorted({*open_to, *(stage for stage, of_gpus in enumerate(for_gpus) if of_gpus)})
    # A GPU process has one worker for each stage that it runs; some stages name its id, others its class.
    named += [stage for stage, ids in enumerate(devices) if ANY_GPU in ids]
    return (
        sorted(set(named))
        or [stage for stage, of_gpus in enumerate(for_gpus) if of_gpus]
        or free
        or range(len(devices))
    )


def _moved(
    workers: Sequence[WorkerInfo], stages: int, kept: Mapping[str, int], deserted: frozenset[int]
) -> dict[str, int]:
    """Returns for each deserted stage the youngest worker of the stage with the most workers, if it has several."""
    moved: dict[str, int] = {}
    for empty in sorted(deserted):
        serving: dict[int, list[WorkerInfo]] = {s: [] for s in range(stages)}
        for worker in sorted(workers, key=lambda w: (w.registered_ms, w.id)):
            if worker.id in kept and worker.id not in moved and _serves(worker):
                serving[kept[worker.id]].append(worker)
        best = max(serving, key=lambda s: (len(serving[s]), -s))
        if not serving[empty] and len(serving[best]) > 1:
            moved[serving[best][-1].id] = empty
    return moved


def _serves(worker: WorkerInfo) -> bool:
    return not worker.draining and not worker.is_late


def _with_newcomers(
    workers: Sequence[WorkerInfo], planned: PlannedSplit, kept: Mapping[str, int], deserted: frozenset[int]
) -> dict[str, int]:
    """Returns `kept` plus a stage for every other worker that does not drain.

    Workers with the least choice come first, and of these the oldest. Each gets the stage with the fewest workers of
    its kind among those that it may get, or a deserted stage where all of these have a worker.
    """
    assignments = dict(kept)
    counts = Counter((_kind(w, planned.folder), kept[w.id]) for w in workers if w.id in kept and _serves(w))
    served = {stage for _, stage in counts}
    newcomers = [(w, _stages_for(w, planned)) for w in workers if w.id not in kept and not w.draining]
    for worker, stages in sorted(newcomers, key=lambda one: (len(one[1]), one[0].registered_ms, one[0].id)):
        if (empty := deserted - served) and served.issuperset(stages):
            stages = sorted(empty)
        stage = min(stages, key=lambda s: (counts[_kind(worker, planned.folder), s], s))
        assignments[worker.id] = stage
        served.add(stage)
        counts[_kind(worker, planned.folder), stage] += 1
    return assignments


def _kind(worker: WorkerInfo, folder: str) -> tuple[str, str]:
    """Returns device class and numerics id: workers of different numerics ids never share a route, so that each id
    needs workers at every stage. The id is that with the block folder that the plan gives all workers."""
    planned = worker.folder_with(folder)
    return worker.device, planned.numerics if planned else worker.numerics
