"""Which worker runs which stage of a split, whatever made the split. Pure.

A worker keeps its stage for life. A newcomer goes to a stage that names its device or class, else to one that names
none, and among these where its device class and numerics id are thinnest; a CPU worker stands in where GPUs are named.
Only a stage that stays empty although others
have workers to spare gets one of those; it drains and comes back as a newcomer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockrelay.protocol.plan import GPU, Plan, WorkerInfo
from blockrelay.protocol.planned_split import ANY_CPU, ANY_GPU, PlannedSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """`stages` worker id -> stage index; `moved` those of them that leave a stage they had for a deserted one."""

    stages: Mapping[str, int]
    moved: Mapping[str, int]


def assign(
    workers: Sequence[WorkerInfo],
    *,
    planned: PlannedSplit,
    current: Plan | None,
    deserted: frozenset[int] = frozenset(),
) -> Assignment:
    """A stage for every worker, except for one that drains before it ever got one, and for one that can only have the
    whole model where there are several stages.

    Assignments of `current` stay while the split is the same, but for those of devices that `planned`, changed, has at
    other stages; a worker that has no record any more has no assignment. `deserted` are stages without a live worker
    for so long that no replacement is to be expected.
    """
    if len(planned.stages) > 1:
        workers = [worker for worker in workers if not worker.whole_model_only]
    kept = _kept(workers, planned, current)
    moved = _moved(workers, len(planned.stages), kept, deserted)
    return Assignment(stages=_with_newcomers(workers, planned, {**kept, **moved}, deserted), moved=moved)


def empty_stages(workers: Sequence[WorkerInfo], plan: Plan) -> frozenset[int]:
    """Stages of the plan to which no worker that still beats belongs."""
    staffed = {plan.assignments[w.id] for w in workers if w.id in plan.assignments and _serves(w)}
    return frozenset(range(len(plan.reasons))) - staffed


def _kept(workers: Sequence[WorkerInfo], planned: PlannedSplit, current: Plan | None) -> dict[str, int]:
    """Stages that are settled: by the plan in force, or by what the worker has already loaded."""
    split = planned.text
    before: Mapping[str, int] = current.assignments if current and current.split == split else {}
    renamed = bool(current) and [*map(list, current.devices)] != [*map(list, planned.devices)]
    kept: dict[str, int] = {}
    for worker in workers:
        stage = before.get(worker.id, worker.stage if worker.split == split else None)
        if stage is not None and not (renamed and stage not in _stages_for(worker, planned)):
            kept[worker.id] = stage
    return kept


def _stages_for(worker: WorkerInfo, planned: PlannedSplit) -> Sequence[int]:
    """Those that name its device, or else its class; where none does those that name none, and where all name others
    all. Stages of GPUs are for CPU workers without a stage of their own too, which stand in there."""
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
    # A process of a GPU has a worker for each stage of it: some by its id, others by its class.
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


def _with_newcomers(
    workers: Sequence[WorkerInfo], planned: PlannedSplit, kept: Mapping[str, int], deserted: frozenset[int]
) -> dict[str, int]:
    """`kept` plus a stage for everybody else, those with the least choice first and of these the oldest: of those for
    its device the one with the fewest workers of the same kind; a deserted one where all of those have a worker."""
    assignments = dict(kept)
    counts = Counter((_kind(w), kept[w.id]) for w in workers if w.id in kept and _serves(w))
    staffed = {stage for _, stage in counts}
    newcomers = [(w, _stages_for(w, planned)) for w in workers if w.id not in kept and not w.draining]
    for worker, stages in sorted(newcomers, key=lambda one: (len(one[1]), one[0].registered_ms, one[0].id)):
        if (empty := deserted - staffed) and staffed.issuperset(stages):
            stages = sorted(empty)
        stage = min(stages, key=lambda s: (counts[_kind(worker), s], s))
        assignments[worker.id] = stage
        staffed.add(stage)
        counts[_kind(worker), stage] += 1
    return assignments


def _kind(worker: WorkerInfo) -> tuple[str, str]:
    """Workers of different numerics ids never share a route, so each numerics id needs workers at every stage."""
    return worker.device, worker.numerics
