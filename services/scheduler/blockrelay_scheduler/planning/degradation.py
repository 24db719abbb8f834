"""Decides when a cell changes to a smaller precision for want of memory, and when it goes back. Pure.

What the cell has done before is read from its plan history, so that every scheduler decides alike, also after a start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blockrelay.protocol.plan import CPU, GPU, Plan, WorkerInfo, is_served
from blockrelay.protocol.served_folder import ServedFolder
from blockrelay.redis.plan_history import PlanEntry
from blockrelay_scheduler.planning.precision_change import check_memory, precisions_of, staying
from blockrelay_scheduler.policy import RESTORE_MARGIN, RESTORE_WAIT_MAX_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Degraded:
    """A cell that serves a smaller precision than an operator gave it."""

    original: str
    """Key of the folder that it served before; "": that with which its workers started."""
    since_ms: int
    """When it last changed its precision for want of memory (Unix milliseconds)."""
    times: int
    """How often it has left that precision: since an operator changed it, or since it could keep it for long."""

    def wait_s(self, first_s: float) -> float:
        """Returns the seconds before it goes back: `first_s`, twice as long each time that it did not last."""
        return min(first_s * 2 ** (self.times - 1), max(first_s, RESTORE_WAIT_MAX_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """A change of precision that memory asks for."""

    folder: str
    """Key of the folder to change to; "": that with which workers started."""
    origin: Literal["degraded", "restored"]
    precision: str
    """Precision of that folder."""
    reason: str


def degraded_from(history: Sequence[PlanEntry], *, first_s: float = 300.0) -> Degraded | None:
    """Returns from what a cell with this plan history (newest first) is degraded; None if it is not.

    An operator who changes the precision meanwhile, or sets the present one, ends that. So does a history that has lost
    the entry of the precision before. `first_s` is the wait before the first return, by which `times` are counted.
    """
    now: Degraded | None = None
    times, kept_from_ms, before = 0, 0, None
    for entry in reversed(history):
        folder = entry.planned.folder
        if before is None:
            pass  # the oldest one: what it changed is not known
        elif entry.origin == "degraded":
            if now is None:
                last = Degraded(original=before, since_ms=0, times=max(1, times))
                has_lasted = entry.at_ms - kept_from_ms > 2000 * last.wait_s(first_s)
                times = 1 if has_lasted else times + 1
            now = Degraded(original=now.original if now else before, since_ms=entry.at_ms, times=times)
        elif entry.origin == "restored":
            kept_from_ms = entry.at_ms
            now = Degraded(original=now.original, since_ms=entry.at_ms, times=times) if now else None
            if now and now.original == folder:
                now = None
        elif folder != before or entry.origin == "precision":
            now, times = None, 0
        before = folder
    return now


def memory_change(
    workers: Sequence[WorkerInfo],
    plan: Plan,
    history: Sequence[PlanEntry],
    *,
    now_ms: int,
    first_s: float,
) -> MemoryChange | None:
    """Returns the change of precision that is due now, or None.

    `workers` are those of one model, `plan` is in force, and `history` are its plans, newest first. Nothing is due
    before the newest entry is in force. `first_s`: seconds before the first return to the larger precision.
    """
    if not workers or not history or history[0].planned.folder != plan.folder:
        return None
    short = _without_memory(workers, plan)
    if short is not None:
        return _smaller(_placed(workers, plan), plan, short)
    degraded = degraded_from(history, first_s=first_s)
    if degraded is None or now_ms - degraded.since_ms < 1000 * degraded.wait_s(first_s):
        return None
    return _larger(_placed(workers, plan), plan, degraded)


def _without_memory(workers: Sequence[WorkerInfo], plan: Plan) -> WorkerInfo | None:
    """Returns a worker that lacks memory for its part of the plan's folder, if no other one serves its stage.

    A CPU worker counts in the place of another CPU worker alone. Nor is there one while routes of the borders before
    serve the folder: then the borders were moved too far.
    """
    wanted = plan.folder or workers[0].model
    before = {one.split for one in workers if one.folder == wanted and one.state == "ready"} - {plan.split}
    if any(is_served(split, [one for one in workers if one.folder == wanted]) for split in before):
        return None
    for worker in workers:
        stage = plan.assignments.get(worker.id)
        if stage is None or not worker.is_alive or worker.draining or worker.short_of != wanted:
            continue
        if not any(
            (one.split, one.stage, one.folder) == (plan.split, stage, wanted)
            for one in workers
            if one.state == "ready" and (one.device == GPU or worker.device == CPU)
        ):
            return worker
    return None


def _smaller(workers: Sequence[WorkerInfo], plan: Plan, short: WorkerInfo) -> MemoryChange | None:
    """Returns the change to the largest smaller folder that memory has room for, or to the smallest."""
    present = short.folder_with(plan.folder)
    smaller = [one for one in _common(workers) if present and 0 < _bytes(workers, one) < _bytes(workers, present)]
    if present is None or not smaller:
        return None
    fitting = [one for one in smaller if check_memory(workers, one) is None]
    chosen = max(fitting, key=lambda one: _bytes(workers, one), default=None)
    chosen = chosen or min(smaller, key=lambda one: _bytes(workers, one))
    return MemoryChange(
        folder=_planned_key(chosen, short.model),
        origin="degraded",
        precision=chosen.precision,
        reason=f"worker {short.id} on {short.node or 'its machine'} lacks memory for its part of {present.precision}",
    )


def _larger(workers: Sequence[WorkerInfo], plan: Plan, degraded: Degraded) -> MemoryChange | None:
    """Returns the change to the largest folder up to the original one that memory has room for, with a margin."""
    if not workers:
        return None
    model = workers[0].model
    common = {one.key: one for one in _common(workers)}
    present, original = common.get(plan.folder or model), common.get(degraded.original or model)
    if present is None or original is None or precisions_of(workers, plan, model).pending:
        return None
    least, most = _bytes(workers, present), _bytes(workers, original)
    larger = [one for one in common.values() if least < _bytes(workers, one) <= most]
    fitting = [one for one in larger if check_memory(workers, one, margin=RESTORE_MARGIN) is None]
    if not fitting:
        return None
    chosen = max(fitting, key=lambda one: _bytes(workers, one))
    return MemoryChange(
        folder=_planned_key(chosen, model),
        origin="restored",
        precision=chosen.precision,
        reason=f"there is memory for {chosen.precision} again",
    )


def _placed(workers: Sequence[WorkerInfo], plan: Plan) -> list[WorkerInfo]:
    """Returns the workers that stay and have a stage in the plan."""
    return [one for one in staying(workers) if one.id in plan.assignments]


def _common(workers: Sequence[WorkerInfo]) -> list[ServedFolder]:
    """Returns the folders that all `workers` have, as the first of them describes each."""
    first = workers[0].folders if workers else ()
    return [folder for folder in first if all(one.folder_with(folder.key) for one in workers)]


def _bytes(workers: Sequence[WorkerInfo], folder: ServedFolder) -> int:
    """Returns what the stages of all workers need of a folder, as far as their records say."""
    return sum(one.bytes for worker in workers if (one := worker.folder_with(folder.key)))


def _planned_key(folder: ServedFolder, model: str) -> str:
    """Returns a folder's key as plans have it: "" for that with which workers started."""
    return "" if folder.key == model else folder.key
