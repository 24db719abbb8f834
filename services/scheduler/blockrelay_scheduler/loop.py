"""The scheduler's loop: read the registry, declare the dead, publish the plan, rescue what is stuck.

Decisions come from `planning` and `recovery`, which are pure; `liveness`, `plan_publisher` and `rescuer` perform them
by scripts, so any number of schedulers may run and none of them keeps anything that matters.
"""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from blockrelay.errors import RedisTrouble
from blockrelay.observability import logs
from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.protocol.plan import WorkerInfo
from blockrelay.protocol.planned_split import PlannedSplit
from blockrelay.protocol.transitions import calls
from blockrelay.redis import registry
from blockrelay.redis.cell_settings import CellSettings, publish_cell_settings, read_cell_settings
from blockrelay.redis.client import backoff_s, check_redis, wait_for_redis
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import SchedulerSettings
from blockrelay_scheduler.cell_metrics.gauges import set_gauges
from blockrelay_scheduler.inbox_sweeper import InboxSweeper
from blockrelay_scheduler.link import Link
from blockrelay_scheduler.liveness import Liveness
from blockrelay_scheduler.plan_publisher import PlanPublisher
from blockrelay_scheduler.planning.assignment import empty_stages
from blockrelay_scheduler.policy import LOOK_S
from blockrelay_scheduler.rescuer import Rescuer
from blockrelay_scheduler.states import SCHEDULER, SchedulerMachine
from blockrelay_scheduler.upgrade import CellUpgrade


@dataclass(slots=True)
class Scheduler:
    """Schedules one model of one cell. `model` is its key in Redis, `planned` the stages that it is cut into.

    One thread calls `run` (or `tick`); `gaps` may be called from any.
    """

    settings: SchedulerSettings
    link: Link
    metrics: SchedulerMetrics
    model: str
    planned: PlannedSplit
    liveness: Liveness = field(init=False)
    _publisher: PlanPublisher = field(init=False)
    _rescuer: Rescuer = field(init=False)
    _upgrade: CellUpgrade = field(init=False)
    _last_tick: float = field(default=float("-inf"), init=False)
    _last_look: float = field(default=float("-inf"), init=False)
    _seen: frozenset[str] = field(default=frozenset(), init=False)  # in the last round
    _sweeper: InboxSweeper | None = field(default=None, init=False)
    _cell: CellSettings = field(init=False)  # those in force
    _began: bool = field(default=False, init=False)  # and ours were, once
    _away: str = field(default="Redis has not answered yet", init=False)
    _watch: RedisWatch = field(init=False)
    _state: SchedulerMachine = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self._state = SchedulerMachine(SCHEDULER)
        self.metrics.states.show(self._state)
        self._cell = CellSettings.of(settings)
        self._watch = RedisWatch(self.metrics.redis_errors)
        self.liveness = Liveness(self.link, self._cell.dead_after_ms)
        self._publisher = PlanPublisher(
            self.link,
            self.model,
            self.planned,
            vacancy_s=settings.vacancy_s,
            name=settings.node_id or logs.node_name("scheduler"),
        )
        self._rescuer = Rescuer(self.link, settings)
        self._upgrade = CellUpgrade(self.link, raises=settings.raise_protocol)

    def run(self, stop: threading.Event) -> None:
        """Tick until `stop`. Trouble with Redis: say so, wait with backoff, go on.

        Raises UsageError when, at the start, a Redis says that it will never serve us like this.
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
        check_redis(self.link.client, "control Redis", cell=self.link.keys)
        if self.link.payload is not self.link.client:
            try:
                check_redis(self.link.payload, "payload Redis")
            except RedisTrouble as error:
                self._watch.met(error)  # the sweeper waits for it

    def _trouble(self, error: RedisTrouble) -> None:
        self._watch.failed("schedule", error)
        if self._state.state != "error":
            self._state.on("redis_trouble")
        self._away = error.plainly
        self._last_tick = float("-inf")

    def _tick_until(self, stop: threading.Event) -> None:
        attempt = 0
        while not stop.is_set():
            try:
                self.tick()
            except RedisTrouble as error:
                if error.code == "PROTOCOL":  # said by DEAD, before this round gave the cell its number
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
        """One round. Raises RedisTrouble; the next round makes up for it."""
        started = time.monotonic()
        self._state.on("round_begins")
        self.liveness.judge_contact(self._last_tick, self.settings.tick_s)
        self.liveness.declare_dead()  # first: whatever Redis stands still for before it would make beats look old
        self._upgrade.look()
        self._agree()
        workers = registry.read_workers(self.link.client, self.link.keys, self.model)
        plan = self._publisher.publish(workers, trusted=self.liveness.trusted)
        self._sweep(workers)
        if time.monotonic() - max(self._last_look, self.liveness.settled_from) >= LOOK_S:
            self._rescuer.rescue()
            self._rescuer.forget_letters()
            set_gauges(self.link, self.metrics, self.settings, self.model, workers, plan, self._migrate())
            self._last_look = time.monotonic()
        self._state.on("workers_missing" if empty_stages(workers, plan) else "published")
        self._away = ""
        self._last_tick = started  # its start: a round in which Redis stood still must look long

    def gaps(self) -> list[str]:
        """Why the scheduler does not do its work right now; empty when it does."""
        if self._away:
            return [self._away]
        late = time.monotonic() - self._last_tick
        return [f"the loop has not finished a round for {late:.0f} s"] if late > 10 + self.settings.tick_s else []

    def _agree(self) -> None:
        """On what holds for the whole cell: the values of the scheduler that began last, whatever Redis forgets."""
        found = read_cell_settings(self.link.client, self.link.keys) if self._began else None
        if found is None:
            publish_cell_settings(self.link.client, self.link.keys, self._cell)
        elif found != self._cell:
            found.tell(CellSettings.of(self.settings))
            self._cell, self.liveness.dead_after_ms = found, found.dead_after_ms
        self._began = True

    def _sweep(self, workers: list[WorkerInfo]) -> None:
        """Rows of workers that left the registry, whatever declared them dead."""
        present = frozenset(w.id for w in workers)
        if self._sweeper is not None:
            self._sweeper.sweep(self._without_record((self._seen | self.liveness.dead) - present))
        self._seen = present
        self.liveness.dead.clear()

    def _without_record(self, workers: frozenset[str]) -> frozenset[str]:
        """Those that have none; a live worker always has one."""
        ask = self.link.client.pipeline(transaction=False)
        for worker in (names := sorted(workers)):
            ask.exists(self.link.keys.worker(worker))
        return frozenset(name for name, known in zip(names, ask.execute(), strict=True) if not known)

    def _migrate(self) -> list[calls.Awaited]:
        """Let go what has waited too long for a numerics id that nobody serves; what waits for one afterwards."""
        call = calls.migrate(self.model, patience_s=self.settings.numerics_wait_s)
        found = self.link.scripts.run(call)
        for one in found:
            if one.freed:
                logs.get().warning(
                    "NUMERICS_GONE", numerics=one.numerics, requests=one.freed, without_worker_s=one.absent_s
                )
        return found
