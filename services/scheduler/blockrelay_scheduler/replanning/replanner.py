"""Moves the borders of stages of a running system where measurements say that its steps would be shorter."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, cast

from blockrelay.observability import logs
from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.protocol.plan import Plan, Stage, WorkerInfo, split_text, succeeded
from blockrelay.quantities import counted, format_seconds
from blockrelay.redis import plan_history
from blockrelay.redis.plan_history import PlanEntry
from blockrelay.settings import SchedulerSettings
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.planning.cost_model import CostModel
from blockrelay_scheduler.policy import REPLAN_KEPT, REPLAN_LOOK_S
from blockrelay_scheduler.replanning import measured_profile
from blockrelay_scheduler.replanning.borders import Borders, Load, System
from blockrelay_scheduler.replanning.corrections import comparisons, corrected, process_of
from blockrelay_scheduler.replanning.measured_profile import MeasuredProfile


@dataclass(slots=True)
class Replanner:
    """Compares a system with its plan, and enters a better one in the plan history. One thread calls it."""

    link: SchedulerLinks
    model: str
    """The model's key in Redis."""
    costs: CostModel
    """The times of the profile that the plan was made from, or guesses where there is none."""
    check_cut: Callable[[Sequence[Stage]], None]
    """Raises BlockFolderError for stages that the model cannot be cut into."""
    settings: SchedulerSettings
    metrics: SchedulerMetrics
    name: str
    """The scheduler's name, which entries of the history bear."""
    _looked: float = field(default=float("-inf"), init=False)  # monotonic; see REPLAN_LOOK_S

    def look(self, workers: Sequence[WorkerInfo], plan: Plan, entry: PlanEntry) -> None:
        """Corrects the cell's measured profile, and moves borders if that has paid for long enough.

        `plan` is in force, and `entry` is the newest of the history. Looks every REPLAN_LOOK_S seconds at most. While
        workers move, and after a rollback, borders stay. Raises RedisTrouble.
        """
        if time.monotonic() - self._looked < REPLAN_LOOK_S:
            return
        self._looked = time.monotonic()
        leaving = succeeded(workers)
        serving = [one for one in workers if one.state == "ready" and one.id not in leaving and one.split == plan.split]
        self._show(serving)
        if self.settings.replan == "off" or leaving or plan.split != entry.planned.text:
            return
        content = measured_profile.read(self.link.client, self.link.keys, self.model)
        before = measured_profile.decode(content)
        if before is None:
            if content is not None:
                logs.get().warning("MEASURED_PROFILE_DAMAGED", reason="it is measured again")
            before = MeasuredProfile()
        record, change = self._decided(serving, entry, corrected(self.costs, serving, before))
        if record == before and content is not None:
            return
        if (
            measured_profile.replace(self.link.client, self.link.keys, self.model, record, instead_of=content)
            and change
        ):
            self._enter(entry, *change, record, serving)

    def _decided(
        self, serving: Sequence[WorkerInfo], entry: PlanEntry, record: MeasuredProfile
    ) -> tuple[MeasuredProfile, tuple[Borders, Borders] | None]:
        """Returns the record to write, and the borders in force with better ones if these are due."""
        stages = entry.planned.stages
        on = [tuple(worker for worker in serving if worker.stage == index) for index in range(len(stages))]
        requests = sum(worker.running for worker in on[0])
        if len(stages) > 1 and all(on) and not requests:
            return record, None  # a pause between requests says nothing
        measured = all(on) and all(worker.block_times for each in on for worker in each)
        if len(stages) == 1 or not measured or entry.origin == "rollback":
            self.metrics.plan_gain.set(0)
            return replace(record, better_since_ms=None), None
        system = System(
            costs=self.costs,
            measured=record,
            stages=stages,
            workers=tuple(on),
            check_cut=self.check_cut,
            least_gain=self.settings.replan_gain,
        )
        load = Load(requests=requests, context=fmean(w.block_times.context for w in serving if w.block_times))
        present, best = system.present(load), system.best(load)
        gain = present.seconds / best.seconds - 1
        self.metrics.plan_gain.set(gain)
        needed = self.settings.replan_gain
        if gain < (needed if record.better_since_ms is None else needed * REPLAN_KEPT):
            return replace(record, better_since_ms=None), None
        seconds, micros = cast(Any, self.link.client.time())
        now_ms = seconds * 1000 + micros // 1000
        since_ms, last_ms = record.better_since_ms, record.replanned_ms
        if since_ms is None:
            return replace(record, better_since_ms=now_ms), None
        early = now_ms - since_ms < 1000 * self.settings.replan_after_s
        if early or gain < needed or (last_ms is not None and now_ms - last_ms < 1000 * self.settings.replan_every_s):
            return record, None
        return replace(record, better_since_ms=None, replanned_ms=now_ms), (present, best)

    def _enter(
        self, entry: PlanEntry, present: Borders, best: Borders, record: MeasuredProfile, serving: Sequence[WorkerInfo]
    ) -> None:
        """Enters the better borders in the plan history, unless another entry has come meanwhile."""
        gain = f"{format_seconds(best.seconds)} a step instead of {format_seconds(present.seconds)}, as measured"
        planned = replace(
            entry.planned,
            stages=best.stages,
            reasons=tuple(
                f"{counted(stage.last - stage.first + 1, 'block')} for {gain}{_slowness(index, serving, record)}"
                for index, stage in enumerate(best.stages)
            ),
        )
        if plan_history.append(
            self.link.client, self.link.keys, self.model, planned, origin="measured", who=self.name, behind=entry.id
        ):
            logs.get().info("BORDERS_MOVED", before=entry.planned.text, split=split_text(best.stages), reason=gain)

    def _show(self, serving: Sequence[WorkerInfo]) -> None:
        """Sets the gauges of predicted and observed seconds."""
        found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        for worker in serving:
            for number, one in comparisons(self.costs, worker).items():
                found[number, worker.device_id or worker.device].append((one.predicted, one.observed))
        for gauge, at in ((self.metrics.plan_predicted, 0), (self.metrics.plan_observed, 1)):
            gauge.clear()
            for (number, device), pairs in found.items():
                gauge.labels(f"block_{number}", device).set(fmean(pair[at] for pair in pairs))


def _slowness(stage: int, serving: Sequence[WorkerInfo], record: MeasuredProfile) -> str:
    """Returns the end of a reason where the workers of a stage are slower than the fastest by a tenth and more."""
    fastest = min(record.processes.values(), default=1.0)
    mine = [record.processes[name] for w in serving if w.stage == stage and (name := process_of(w)) in record.processes]
    slower = max(mine, default=fastest) / fastest
    return f"; it is {slower:.1f} times as slow as the fastest" if slower >= 1.1 else ""
