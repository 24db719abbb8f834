"""What another split would change for the workers that are there. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockrelay.errors import UsageError
from blockrelay.protocol.plan import Plan, WorkerInfo
from blockrelay.protocol.planned_split import PlannedSplit
from blockrelay_scheduler.planning.plan_builder import decide


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """`plan` as it would be for the workers of now; `moving` those that would load other blocks."""

    before: Plan
    plan: Plan
    moving: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """What `plan apply --json` prints of it."""
        return {
            "before": self.before.split,
            "split": self.plan.split,
            "reasons": list(self.plan.reasons),
            "devices": list(map(list, self.plan.devices)),
            "assignments": dict(self.plan.assignments),
            "moving": list(self.moving),
        }


def change(workers: Sequence[WorkerInfo], planned: PlannedSplit, current: Plan) -> PlanChange:
    """From the plan in force to `planned`. UsageError where some stage would have no worker."""
    there = [worker for worker in workers if worker.is_alive and not worker.draining]
    plan = decide(there, planned=planned, current=current).plan
    staffed = set(plan.assignments.values())
    if empty := [stage for index, stage in enumerate(planned.stages) if index not in staffed]:
        blocks = ", ".join(f"{stage.first}-{stage.last}" for stage in empty)
        raise UsageError(
            f"the plan has {len(planned.stages)} stages, and {len(there)} workers are there: nobody would run "
            f"{blocks}; start more workers first"
        )
    moving = [w.id for w in there if w.stage is not None and (w.split, w.stage) != (plan.split, plan.assignments[w.id])]
    return PlanChange(before=current, plan=plan, moving=tuple(moving))
