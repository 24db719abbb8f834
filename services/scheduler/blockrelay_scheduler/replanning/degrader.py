"""Enters smaller precisions in the plan history where memory lacks, and the larger ones again when there is room."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from blockrelay.observability import logs
from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.protocol.plan import Plan, WorkerInfo
from blockrelay.redis import plan_history
from blockrelay.settings import SchedulerSettings
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.planning.degradation import MemoryChange, degraded_from, memory_change
from blockrelay_scheduler.policy import DEGRADE_AFTER_S, MEMORY_LOOK_S


@dataclass(slots=True)
class Degrader:
    """Changes the precision of one model as memory asks for, where the settings allow it. One thread calls it."""

    link: SchedulerLinks
    model: str
    """The model's key in Redis."""
    settings: SchedulerSettings
    metrics: SchedulerMetrics
    name: str
    """The scheduler's name, which entries of the history bear."""
    _looked: float = field(default=float("-inf"), init=False)  # monotonic; see MEMORY_LOOK_S
    _lacking_since: float | None = field(default=None, init=False)  # monotonic; see DEGRADE_AFTER_S

    def look(self, workers: Sequence[WorkerInfo], plan: Plan) -> None:
        """Enters the change that is due, if there is one; `plan` is in force. Raises RedisTrouble."""
        if self.settings.degrade == "off" or time.monotonic() - self._looked < MEMORY_LOOK_S:
            return
        self._looked = time.monotonic()
        history = plan_history.read_history(self.link.client, self.link.keys, self.model)
        seconds, micros = cast(Any, self.link.client.time())
        first_s = self.settings.restore_after_s
        change = memory_change(workers, plan, history, now_ms=seconds * 1000 + micros // 1000, first_s=first_s)
        is_less = degraded_from(history, first_s=first_s) is not None
        if self._is_due(change) and change and self._enter(change, history[0]):
            is_less = change.origin == "degraded"
        self.metrics.degraded.set(int(is_less))

    def _is_due(self, change: MemoryChange | None) -> bool:
        """Returns whether memory has lacked for long enough: a worker that only starts again serves soon."""
        if change is None or change.origin != "degraded":
            self._lacking_since = None
            return change is not None
        now = time.monotonic()
        self._lacking_since = self._lacking_since or now
        return now - self._lacking_since >= DEGRADE_AFTER_S

    def _enter(self, change: MemoryChange, newest: plan_history.PlanEntry) -> bool:
        """Enters a change behind the newest entry. Returns False if another entry has come meanwhile."""
        planned, who = replace(newest.planned, folder=change.folder), f"{self.name}: {change.reason}"
        entry = plan_history.append(
            self.link.client, self.link.keys, self.model, planned, origin=change.origin, who=who, behind=newest.id
        )
        if entry is None:
            return False
        event = "PRECISION_DEGRADED" if change.origin == "degraded" else "PRECISION_RESTORED"
        logs.get().warning(event, precision=change.precision, reason=change.reason)
        self.metrics.memory_changes.labels(change.origin).inc()
        return True
