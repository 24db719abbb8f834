"""Explains a placement: stages, memory, seconds of a step, tokens per second, and a reason for each stage. Pure."""

from dataclasses import dataclass
from typing import Any

from blockrelay_scheduler.planning.prediction import SIZES, Predicted, predict, spread
from blockrelay_scheduler.planning.problem import Part, Placement, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage of a placement, with the class of its devices and the bytes on each of them."""

    part: Part
    device_class: str
    weight_bytes: int
    kv_bytes: int
    """Bytes of the KV pages that must have room."""
    memory_bytes: int | None
    """The memory of a device; None: unknown."""

    @property
    def blocks(self) -> str:
        """The blocks as text, `1-3`."""
        return f"{self.part.first}-{self.part.last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The content of what `blockrelay plan` prints."""

    strategy: str
    problem: Problem
    placement: Placement
    stages: tuple[StageReport, ...]
    predicted: tuple[Predicted, ...]
    """One for each number of requests in SIZES."""
    estimated: tuple[str, ...]
    """Ids of the devices whose times were not measured."""
    assumed: tuple[str, ...]
    """Other figures that were not measured, one sentence each."""
    spreads: tuple[tuple[float, float], ...]
    """The least and the most seconds of each predicted step. Empty if the profile has the classes of all devices and
    the overhead of a step."""

    @property
    def reasons(self) -> list[str]:
        """One sentence for each stage."""
        return [f"{p.blocks} on {' and '.join(p.devices)}: {p.reason}" for p in self.placement.parts]

    @property
    def measured(self) -> str | None:
        """The machine and time at which the profile was measured, if it has them; None: neither, or no profile."""
        profile = self.problem.costs.profile
        return " at ".join(filter(None, (profile.machine, profile.measured))) or None if profile else None

    def to_json(self) -> dict[str, Any]:
        """The object that `blockrelay plan --json` prints."""
        return {
            "strategy": self.strategy,
            "objective": self.problem.objective,
            "context": self.problem.promise.context,
            "requests": self.problem.promise.requests,
            "plan": {
                f"block_{block}": stage.device_class
                for stage in self.stages
                for block in range(stage.part.first, stage.part.last + 1)
            },
            "stages": [
                {
                    "blocks": stage.blocks,
                    "device": stage.part.devices[0],
                    "devices": list(stage.part.devices),
                    "class": stage.device_class,
                    "reason": stage.part.reason,
                    "bytes": stage.weight_bytes,
                    "kv_bytes": stage.kv_bytes,
                    "predicted_seconds": {str(one.requests): one.part_seconds[at] for one in self.predicted},
                }
                for at, stage in enumerate(self.stages)
            ],
            "groups": {str(one.requests): one.groups for one in self.predicted},
            "predicted_hop_seconds": {str(one.requests): one.hop_seconds for one in self.predicted},
            "predicted_overhead_seconds": {str(one.requests): one.overhead_seconds for one in self.predicted},
            "predicted_step_seconds": {str(one.requests): one.seconds for one in self.predicted},
            "predicted_tokens_per_second": {str(one.requests): one.tokens_per_second for one in self.predicted},
            "tokens_per_second_range": {
                str(one.requests): [one.requests / upper, one.requests / lower]
                for one, (lower, upper) in zip(self.predicted, self.spreads, strict=False)
            },
            "profile": self.measured,
            "estimated": list(self.estimated),
            "assumed": list(self.assumed),
            "reasons": self.reasons,
            **(self.placement.notes or {}),
        }


def report(strategy: str, problem: Problem, placement: Placement) -> PlanReport:
    """Predicts and explains `placement`, which the strategy of this name chose for `problem` (see `registry.place`)."""
    names = dict.fromkeys(name for part in placement.parts for name in part.devices)
    used = [problem.fleet.device(name) for name in names]
    predicted = tuple(predict(problem, placement, size) for size in SIZES)
    return PlanReport(
        strategy=strategy,
        problem=problem,
        placement=placement,
        stages=tuple(_stage(problem, part) for part in placement.parts),
        predicted=predicted,
        spreads=tuple(filter(None, (spread(problem, placement, one) for one in predicted))),
        estimated=tuple(device.id for device in used if problem.costs.is_estimated(device)),
        assumed=tuple(problem.costs.assumptions(used, hops=len(placement.parts) > 1)),
    )


def _stage(problem: Problem, part: Part) -> StageReport:
    """Returns the report of one stage."""
    devices = [problem.fleet.device(name) for name in part.devices]
    return StageReport(
        part=part,
        device_class=devices[0].device_class,
        weight_bytes=problem.costs.weight_bytes(part.first, part.last, devices[0]),
        kv_bytes=problem.kv_bytes(part.first, part.last, len(devices)),
        memory_bytes=devices[0].memory_bytes,
    )
