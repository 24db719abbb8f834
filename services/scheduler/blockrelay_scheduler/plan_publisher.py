"""Keeps the plan in force the one that the workers need, by PLAN, beside any number of other schedulers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from blockrelay.observability import logs
from blockrelay.planning.plan_file import PlannedSplit
from blockrelay.protocol.plan import Plan, WorkerInfo, parse_split, split_text
from blockrelay.protocol.transitions import calls
from blockrelay.redis import registry
from blockrelay_scheduler.link import Link
from blockrelay_scheduler.planning.assignment import empty_stages
from blockrelay_scheduler.planning.plan_builder import decide

#: How a stage of a plan that does not say came to its blocks.
UNTOLD = "as it was planned before"


@dataclass(slots=True)
class PlanPublisher:
    """Publishes plans of one model, in the stages of `planned`.

    A stage that has been empty for `vacancy_s`, longer than a replacement takes to come, gets a worker of another.
    """

    link: Link
    model: str
    planned: PlannedSplit
    vacancy_s: float
    _empty_since: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _published: int | None = field(default=None, init=False)  # the epoch of the last plan of ours

    def publish(self, workers: Sequence[WorkerInfo], *, trusted: bool) -> Plan:
        """The plan in force afterwards. `trusted`: the silence of workers means something. Raises RedisTrouble."""
        fields = cast(dict[bytes, bytes], self.link.client.hgetall(self.link.keys.plan(self.model)))
        current = Plan.from_redis(fields)
        self._yield_to(current)
        deserted = self._deserted(workers, current, trusted)
        decision = decide(workers, planned=self.planned, current=current, deserted=deserted)
        if current and fields.get(b"inputs", b"").decode() == decision.inputs:
            return current
        publish = calls.publish_plan(
            self.model,
            replaces_epoch=current.epoch if current else 0,
            inputs=decision.inputs,
            route_class=decision.plan.route_class,
            plan=decision.plan.to_json(),
        )
        if self.link.scripts.run(publish) == decision.plan.epoch:
            self._published = decision.plan.epoch
            logs.get().info(
                "PLAN_IN_FORCE",
                epoch=decision.plan.epoch,
                split=decision.plan.split,
                assignments=dict(decision.plan.assignments),
                reasons=decision.plan.reasons,
            )
        return registry.read_plan(self.link.client, self.link.keys, self.model) or decision.plan

    def _yield_to(self, current: Plan | None) -> None:
        """Schedulers that were given different plans must not overwrite each other's without end.

        A scheduler that has published a plan adopts the stages of a later one: the one that began last decides.
        """
        if current is None or self._published is None or current.epoch <= self._published:
            return
        stages = parse_split(current.split)
        theirs = PlannedSplit(stages=stages, reasons=current.why or (UNTOLD,) * len(stages))
        if theirs != self.planned:
            ours = split_text(self.planned.stages)
            logs.get().warning("STAGES_CHANGED_ELSEWHERE", ours=ours, theirs=current.split, epoch=current.epoch)
            self.planned = theirs

    def _deserted(self, workers: Sequence[WorkerInfo], plan: Plan | None, trusted: bool) -> frozenset[int]:
        """Stages that have been empty for longer than `vacancy_s`."""
        now = time.monotonic()
        empty = empty_stages(workers, plan) if plan and trusted else frozenset[int]()
        self._empty_since = {stage: self._empty_since.get(stage, now) for stage in empty}
        return frozenset(s for s, since in self._empty_since.items() if now - since > self.vacancy_s)
