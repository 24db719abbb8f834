"""Which worker runs which stage of a split, whatever made the split. Pure.

A worker keeps its stage for life; a newcomer goes where its device class and numerics id are thinnest. Only a stage
that stays empty although others have workers to spare gets one of those; it drains and comes back as a newcomer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockrelay.protocol.plan import Plan, WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """`stages` worker id -> stage index; `moved` those of them that leave a stage they had for a deserted one."""

    stages: Mapping[str, int]
    moved: Mapping[str, int]


def assign(
    workers: Sequence[WorkerInfo],
    *,
    split: str,
    stages: int,
    current: Plan | None,
    deserted: frozenset[int] = frozenset(),
) -> Assignment:
    """A stage for every worker, except for one that drains before it ever got one.

    `split` is the split as text, of `stages` stages. Assignments of `current` stay while the split is the same; a
    worker that has no record any more has no assignment. `deserted` are stages without a live worker for so long that
    no replacement is to be expected.
    """
    kept = _kept(workers, split, current)
    moved = _moved(workers, stages, kept, deserted)
    return Assignment(stages=_with_newcomers(workers, stages, {**kept, **moved}), moved=moved)


def empty_stages(workers: Sequence[WorkerInfo], plan: Plan) -> frozenset[int]:
    """Stages of the plan to which no worker that still beats belongs."""
    staffed = {plan.assignments[w.id] for w in workers if w.id in plan.assignments and _serves(w)}
    return frozenset(range(len(plan.reasons))) - staffed


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
