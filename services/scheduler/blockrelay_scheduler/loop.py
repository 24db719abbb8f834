"""The scheduler's loop: declare silent workers dead, publish the plan, rescue requests that are stuck.

`planning` and `recovery` decide, and are pure. `liveness`, `plan_publisher` and `rescuer` perform the decisions by
scripts in Redis. All state that matters is there, and so any number of schedulers may run side by side.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from blockrelay.errors import RedisTrouble
from blockrelay.observability import logs
from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.protocol.plan import Stage, WorkerInfo
from blockrelay.protocol.planned_split import PlannedSplit
from blockrelay.protocol.transitions import calls
from blockrelay.redis import registry
from blockrelay.redis.cell_settings import CellSettings, publish_cell_settings, read_cell_settings
from blockrelay.redis.client import backoff_s, check_redis, wait_for_redis
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import SchedulerSettings
from blockrelay_scheduler.cell_metrics.gauges import set_gauges
from blockrelay_scheduler.inbox_sweeper import InboxSweeper
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.liveness import Liveness
from blockrelay_scheduler.plan_publisher import PlanPublisher
from blockrelay_scheduler.planning.assignment import empty_stages
from blockrelay_scheduler.planning.cost_model import CostModel
from blockrelay_scheduler.policy import LOOK_S
from blockrelay_scheduler.replanning.degrader import Degrader
from blockrelay_scheduler.replanning.replanner import Replanner
from blockrelay_scheduler.replanning.slowdowns import SlowdownPublisher
from blockrelay_scheduler.rescuer import Rescuer
from blockrelay_scheduler.states import SCHEDULER, SchedulerMachine
from blockrelay_scheduler.upgrade import CellUpgrade


class Scheduler:
    """Schedules one model of one cell. One thread calls `run` (or `tick`); any thread may call `gaps`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        link: SchedulerLinks,
        metrics: SchedulerMetrics,
        *,
        model: str,
        planned: PlannedSplit,
        costs: CostModel,
        check_cut: Callable[[Sequence[Stage]], None] = lambda _: None,
    ) -> None:
        """`model` is the model's key in Redis; `planned` are the stages that the settings of this scheduler cut the
        model into. `costs` are the times of its blocks, by a profile or by guesses; `check_cut` raises BlockFolderError
        for stages that the model cannot be cut into."""
        self.settings, self.link, self.metrics, self._model = settings, link, metrics, model
        self._state = SchedulerMachine(SCHEDULER)
        metrics.states.show(self._state)
        self._cell = CellSettings.of(settings)  # in force in the cell
        self._watch = RedisWatch(metrics.redis_errors)
        self.liveness = Liveness(link, self._cell.dead_after_ms)
        name = settings.node_id or logs.node_name("scheduler")
        self._publisher = PlanPublisher(link, model, planned, vacancy_s=settings.vacancy_s, name=name)
        self._replanner = Replanner(link, model, costs, check_cut, settings, metrics, name)
        self._slowdowns = SlowdownPublisher(link, model, costs)
        self._degrader = Degrader(link, model, settings, metrics, name)
        self._rescuer = Rescuer(link, settings)
        self._upgrade = CellUpgrade(link, raises=settings.raise_protocol)
        self._sweeper: InboxSweeper | None = None  # None: one Redis for everything
        self._last_tick = float("-inf")  # monotonic; when the last finished round began
        self._last_look = float("-inf")  # monotonic; see LOOK_S
        self._seen = frozenset[str]()  # ids of the workers in the last round
        self._began = False  # our own settings have been published once
        self._away = "Redis has not answered yet"  # the last trouble; empty: none

    def run(self, stop: threading.Event) -> None:
        """Runs rounds until `stop` is set. After an error of Redis it logs, waits with backoff, and goes on.

        Raises UsageError at the start for an error of Redis that no waiting mends, such as a wrong password.
        """
        wait_for_redis(self._look, self._trouble, give_up=stop.is_set, pause=stop.wait)
        self._state.on("joined")
        if self.link.payload is not self.link.client:
            self._sweeper = InboxSweeper(self.link.payload, self.link.keys, self.metrics)
            self._sweeper.start()
        try:
            self._tick_until(stop)
        finally:
            if self._sweeper is not None:
                self._sweeper.close()

    def _look(self) -> None:
        """Checks that both Redis servers can be used; an error of the payload Redis is only logged and counted."""
        check_redis(self.link.client, "control Redis", cell=self.link.keys)
        if self.link.payload is not self.link.client:
            try:
                check_redis(self.link.payload, "payload Redis")
            except RedisTrouble as error:
                self._watch.count_error(error)  # not fatal: the sweeper tries again

    def _trouble(self, error: RedisTrouble) -> None:
        self._watch.failed("schedule", error)
        if self._state.state != "error":
            self._state.on("redis_trouble")
        self._away = error.plainly
        self._last_tick = float("-inf")

    def _tick_until(self, stop: threading.Event) -> None:
        """Runs rounds until `stop` is set, with backoff after errors of Redis."""
        attempt = 0
        while not stop.is_set():
            try:
                self.tick()
            except RedisTrouble as error:
                if error.code == "PROTOCOL":  # the script DEAD runs before this round gives the cell its number
                    with suppress(RedisTrouble):
                        self._upgrade.look()
                self._trouble(error)
                stop.wait(backoff_s(attempt))
                attempt += 1
                continue
            self._watch.worked("schedule")
            attempt = 0
            stop.wait(self.settings.tick_s)

    def tick(self) -> None:
        """Runs one round. Raises RedisTrouble; then the next round of `run` repeats what this one has not done.

        A caller other than `run` must stop after RedisTrouble: another `tick` would raise IllegalTransition.
        """
        started = time.monotonic()
        self._state.on("round_begins")
        self.liveness.judge_contact(self._last_tick, self.settings.tick_s)
        self.liveness.declare_dead()  # first: after a command for which Redis stood still, heartbeats would look old
        self._upgrade.look()
        self._agree()
        workers = registry.read_workers(self.link.client, self.link.keys, self._model)
        plan = self._publisher.publish(workers, trusted=self.liveness.trusted)
        if self._publisher.entry is not None:
            self._replanner.look(workers, plan, self._publisher.entry)
        self._slowdowns.publish(workers)
        if self.liveness.trusted:
            self._degrader.look(workers, plan)
        self._sweep(workers)
        if time.monotonic() - max(self._last_look, self.liveness.settled_from) >= LOOK_S:
            self._rescuer.rescue()
            self._rescuer.forget_letters()
            set_gauges(self.link, self.metrics, self.settings, self._model, workers, plan, self._migrate())
            self._last_look = time.monotonic()
        self._state.on("workers_missing" if empty_stages(workers, plan) else "published")
        self._away = ""
        self._last_tick = started  # not the end: a round in which Redis stood still must look long

    def gaps(self) -> list[str]:
        """Reasons why the scheduler does not do its work right now, one sentence each; empty when it does."""
        if self._away:
            return [self._away]
        late = time.monotonic() - self._last_tick
        return [f"the loop has not finished a round for {late:.0f} s"] if late > 10 + self.settings.tick_s else []

    def _agree(self) -> None:
        """Publishes the cell's settings in the first round and after Redis lost them; otherwise takes those published.

        The scheduler that began last decides for the whole cell.
        """
        published = read_cell_settings(self.link.client, self.link.keys) if self._began else None
        if published is None:
            publish_cell_settings(self.link.client, self.link.keys, self._cell)
        elif published != self._cell:
            published.tell(CellSettings.of(self.settings))
            self._cell, self.liveness.dead_after_ms = published, published.dead_after_ms
        self._began = True

    def _sweep(self, workers: list[WorkerInfo]) -> None:
        """Has the inboxes deleted of workers that left the registry, whichever scheduler declared them dead."""
        present = frozenset(w.id for w in workers)
        if self._sweeper is not None:
            self._sweeper.sweep(self._without_record((self._seen | self.liveness.dead) - present))
        self._seen = present
        self.liveness.dead.clear()

    def _without_record(self, workers: frozenset[str]) -> frozenset[str]:
        """Returns the ids in `workers` without a record in Redis; a live worker always has one."""
        ask = self.link.client.pipeline(transaction=False)
        for worker_id in (ids := sorted(workers)):
            ask.exists(self.link.keys.worker(worker_id))
        return frozenset(worker_id for worker_id, known in zip(ids, ask.execute(), strict=True) if not known)

    def _migrate(self) -> list[calls.Awaited]:
        """Frees re-runs that have waited too long for a numerics id without a worker; returns those that still wait."""
        call = calls.migrate(self._model, patience_s=self.settings.numerics_wait_s)
        awaited = self.link.scripts.run(call)
        for one in awaited:
            if one.freed:
                logs.get().warning(
                    "NUMERICS_GONE", numerics=one.numerics, requests=one.freed, without_worker_s=one.absent_s
                )
        return awaited
