"""Publishes the plan that the workers need, by the script PLAN, beside any number of other schedulers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from blockrelay.observability import logs
from blockrelay.protocol.plan import Plan, WorkerInfo
from blockrelay.protocol.planned_split import PlannedSplit
from blockrelay.protocol.transitions import calls
from blockrelay.redis import plan_history, registry
from blockrelay.redis.plan_history import Origin, PlanEntry
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.planning.assignment import empty_stages
from blockrelay_scheduler.planning.plan_builder import decide, waits_for_more
from blockrelay_scheduler.policy import READY_EVERY_S


@dataclass(slots=True)
class PlanPublisher:
    """Publishes plans of one model, in the stages of the newest entry of its plan history. One thread calls it."""

    link: SchedulerLinks
    model: str
    """The model's key in Redis."""
    planned: PlannedSplit
    """The stages from this scheduler's settings. They become an entry of the history at the start, unless its newest
    entry from settings has the same."""
    vacancy_s: float
    """Seconds without a live worker after which a stage gets one of another; a replacement takes less."""
    name: str
    """The scheduler's name, which its entry of the history bears."""
    _empty_since: dict[int, float] = field(default_factory=dict[int, float], init=False)  # monotonic, by stage
    _ready_published: float = field(default=float("-inf"), init=False)  # monotonic; see READY_EVERY_S
    _entry: PlanEntry | None = field(default=None, init=False)  # the newest, whose stages are published

    @property
    def entry(self) -> PlanEntry | None:
        """The entry of the history that was published last; None before the first."""
        return self._entry

    def publish(self, workers: Sequence[WorkerInfo], *, trusted: bool) -> Plan:
        """Publishes a plan if the workers need another one, and returns the plan in force afterwards.

        `workers` are all registered ones of the model. `trusted`: the silence of workers means something, so that empty
        stages count. A plan that only says which GPUs are ready waits, for READY_EVERY_S at most. Raises RedisTrouble,
        also for a plan, or an entry of the history, that cannot be read.
        """
        fields, entry = self._look()
        current = registry.decode_plan(self.link.keys, self.model, fields)
        deserted = self._deserted(workers, current, trusted)
        decision = decide(workers, planned=entry.planned, source=entry.source, current=current, deserted=deserted)
        if current and fields.get(b"inputs", b"").decode() == decision.inputs:
            return current
        if current and waits_for_more(current, decision.plan):
            if time.monotonic() - self._ready_published < READY_EVERY_S:
                return current
            self._ready_published = time.monotonic()
        publish = calls.publish_plan(
            self.model,
            replaces_epoch=current.epoch if current else 0,
            inputs=decision.inputs,
            route_class=decision.plan.route_class,
            plan=decision.plan.to_json(),
        )
        if self.link.scripts.run(publish) == decision.plan.epoch:
            logs.get().info(
                "PLAN_IN_FORCE",
                epoch=decision.plan.epoch,
                split=decision.plan.split,
                source=decision.plan.source,
                assignments=dict(decision.plan.assignments),
                reasons=decision.plan.reasons,
            )
        return registry.read_plan(self.link.client, self.link.keys, self.model) or decision.plan

    def _look(self) -> tuple[dict[bytes, bytes], PlanEntry]:
        """Reads the fields of the plan in force and the newest entry of the history, both of one moment.

        A scheduler that publishes a plan of an older entry after one of a newer entry then fails on the epoch.
        """
        while self._entry is None:
            self._begin()
        while True:
            both = self.link.client.pipeline(transaction=True)
            both.hgetall(self.link.keys.plan(self.model))
            both.xrevrange(self.link.keys.plan_history(self.model), count=1)
            fields, entries = cast(Any, both.execute())
            entry = plan_history.newest(self.link.keys, self.model, entries)
            if entry is not None:
                break
            self._append(self._entry.planned, self._entry.origin, self._entry.who, behind="")  # Redis lost the history
        if entry.id != self._entry.id:
            logs.get().info("PLAN_CHANGED", split=entry.planned.text, source=entry.source)
        self._entry = entry
        return fields, entry

    def _begin(self) -> None:
        """Enters the stages of our settings in the history, unless its newest entry from settings has the same.

        The block folder stays that of the newest entry.

        What `plan apply` entered after the same settings stays in force, also where it has pushed their entry out.
        `_entry` stays None if another scheduler appended an entry at the same moment.
        """
        history = plan_history.read_history(self.link.client, self.link.keys, self.model)
        given = next((entry for entry in history if entry.origin == "settings"), None)
        forgotten = given is None and len(history) == plan_history.KEPT
        if forgotten or (given and given.planned.serves_as(replace(self.planned, folder=given.planned.folder))):
            self._entry = history[0]
        else:
            newest = history[0] if history else None
            planned = replace(self.planned, folder=newest.planned.folder if newest else "")
            self._append(planned, "settings", self.name, behind=newest.id if newest else "")

    def _append(self, planned: PlannedSplit, origin: Origin, who: str, *, behind: str) -> None:
        added = plan_history.append(
            self.link.client, self.link.keys, self.model, planned, origin=origin, who=who, behind=behind
        )
        self._entry = added or self._entry

    def _deserted(self, workers: Sequence[WorkerInfo], plan: Plan | None, trusted: bool) -> frozenset[int]:
        """Returns the stages that have been empty for longer than `vacancy_s`."""
        now = time.monotonic()
        empty = empty_stages(workers, plan) if plan and trusted else frozenset[int]()
        self._empty_since = {stage: self._empty_since.get(stage, now) for stage in empty}
        return frozenset(s for s, since in self._empty_since.items() if now - since > self.vacancy_s)
