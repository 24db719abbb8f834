"""Checks another split against the workers of a running cell, and says what it would change. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockrelay.errors import UsageError
from blockrelay.protocol.plan import GPU, Plan, WorkerInfo, succeeded
from blockrelay.protocol.planned_split import ANY_CPU, ANY_GPU, PlannedSplit, is_host_device
from blockrelay_scheduler.planning.plan_builder import decide


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """The plan in force and the plan that another split would give with the present workers."""

    before: Plan
    plan: Plan
    moving: tuple[str, ...]
    """Ids of the workers that would load other blocks, or these blocks of another folder."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that `plan apply --json` prints about this change."""
        return {
            "before": self.before.split,
            "split": self.plan.split,
            "reasons": list(self.plan.reasons),
            "devices": list(map(list, self.plan.devices)),
            "assignments": dict(self.plan.assignments),
            "moving": list(self.moving),
        }


def change(
    workers: Sequence[WorkerInfo], planned: PlannedSplit, current: Plan, *, lost: Sequence[str] = ()
) -> PlanChange:
    """Returns the change from the plan in force, `current`, to `planned`.

    `lost` are ids of GPUs that failed, whose workers wait until they can be used again. Raises UsageError for a stage
    that would have no worker, and for a stage on a GPU that no worker has and that is not in `lost`. A name that is no
    id of a host's device, such as gpu0, stands for any GPU. Raises it also for several stages where a worker can only
    run the whole model.
    """
    followed = succeeded(workers)
    serving = [worker for worker in workers if worker.is_alive and not worker.draining and worker.id not in followed]
    _check_devices(planned, [worker.device_id for worker in serving if worker.device == GPU], lost)
    if len(planned.stages) > 1 and (whole := [worker.id for worker in serving if worker.whole_model_only]):
        raise UsageError(
            f"the plan has {len(planned.stages)} stages, and {whole[0]} computes with an import, which runs all blocks "
            "as one stage: start again with --stand-in files"
        )
    plan = decide(serving, planned=planned, current=current).plan
    served = set(plan.assignments.values())
    empty = [stage for index, stage in enumerate(planned.stages) if index not in served]
    if empty and planned.text != current.split:
        blocks = ", ".join(f"{stage.first}-{stage.last}" for stage in empty)
        raise UsageError(
            f"the plan has {len(planned.stages)} stages, and {len(serving)} workers are there: none would run "
            f"{blocks}; start more workers first"
        )
    moving = [
        w.id
        for w in serving
        if w.stage is not None
        and (
            (w.split, w.stage) != (plan.split, plan.assignments[w.id])
            or (w.folder and w.folder != (planned.folder or w.model))
        )
    ]
    return PlanChange(before=current, plan=plan, moving=tuple(moving))


def unserved_gpus(plan: Plan, planned: PlannedSplit, workers: Sequence[WorkerInfo]) -> list[str]:
    """Returns a sentence for each stage of `planned` that is for GPUs and has no live GPU worker in `plan`.

    `plan` is one with the stages of `planned`.
    """
    on_gpu = {plan.assignments.get(worker.id) for worker in workers if worker.device == GPU and worker.is_alive}
    return [
        f"stage {stage.first}-{stage.last} is for {' or '.join(ids)}, and no worker has it now: CPUs serve it until "
        "one comes"
        for index, (stage, ids) in enumerate(zip(planned.stages, map(_gpu_ids, planned.devices), strict=True))
        if planned.for_gpus[index] and index not in on_gpu
    ]


def _check_devices(planned: PlannedSplit, served: Sequence[str], lost: Sequence[str]) -> None:
    """Raises UsageError for a stage whose GPU no worker has.

    `served` and `lost` are the ids of GPUs. A name that is no id of a host's device, such as gpu0, stands for any GPU.
    """
    known = list(dict.fromkeys([*served, *lost]))
    for stage, ids, for_gpu in zip(planned.stages, planned.devices, planned.for_gpus, strict=True):
        wanted = [device for device in ids if device not in (ANY_GPU, ANY_CPU)]
        odd = [device for device in wanted if for_gpu and device not in known and (is_host_device(device) or not known)]
        if odd:
            available = f"they have {', '.join(filter(None, known))}" if known else "none has a GPU"
            text = f"stage {stage.first}-{stage.last} is for {odd[0]}, which no worker has"
            raise UsageError(f"{text}: {available}; start its worker first")


def _gpu_ids(ids: Sequence[str]) -> list[str]:
    return [device for device in ids if device != ANY_CPU]
