"""The scheduler's loop: read the registry, declare the dead, publish the plan, rescue what is stuck.

All decisions come from `planner` and `rescue`; all acts are scripts, so any number of schedulers may run and none of
them keeps anything that matters.
"""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import redis

from blockrelay.errors import RedisTrouble
from blockrelay.observability import logs
from blockrelay.observability.metrics import SchedulerMetrics
from blockrelay.protocol import transitions as calls
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.plan import Plan, WorkerInfo, parse_split
from blockrelay.redis import registry
from blockrelay.redis.cell_settings import CellSettings, publish_cell_settings, read_cell_settings
from blockrelay.redis.client import Scripts, backoff_s, check_redis, wait_for_redis
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import SchedulerSettings
from blockrelay_scheduler.inbox_sweeper import InboxSweeper
from blockrelay_scheduler.planner import decide, empty_stages
from blockrelay_scheduler.recovery import UnfinishedRequest, dead_workers, rescues

#: Seconds between two looks at the unfinished requests and at what metrics tell, and about how many requests one look
#: takes: the next one goes on behind them.
LOOK_S, LOOK_LIMIT = 1.0, 1024


@dataclass(slots=True)
class Link:
    """A connection and the scripts on it. `payload` is the same client when rows share the control Redis."""

    client: redis.Redis
    payload: redis.Redis
    keys: Keys
    scripts: Scripts


@dataclass(slots=True)
class Scheduler:
    """Schedules one model of one cell. `model` is its key in Redis, `blocks` its number of blocks.

    One thread calls `run` (or `tick`); `gaps` may be called from any. `trusted_from` is the moment (monotonic clock)
    from which the silence of a worker means something.
    """

    settings: SchedulerSettings
    link: Link
    metrics: SchedulerMetrics
    model: str
    blocks: int
    trusted_from: float = field(default=float("inf"), init=False)
    _last_tick: float = field(default=float("-inf"), init=False)
    _last_look: float = field(default=float("-inf"), init=False)
    _seen: frozenset[str] = field(default=frozenset(), init=False)  # in the last round
    _dead: set[str] = field(default_factory=set[str], init=False)  # declared so in this round
    _sweeper: InboxSweeper | None = field(default=None, init=False)
    _empty_since: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _published: int | None = field(default=None, init=False)
    _stages: int = field(init=False)
    _cell: CellSettings = field(init=False)  # those in force
    _began: bool = field(default=False, init=False)  # and ours were, once
    _look_from: int = field(default=0, init=False)  # cursor of the walk through `running`
    _away: str = field(default="Redis has not answered yet", init=False)
    _clock_ahead_ms: float = field(default=0.0, init=False)  # Redis' clock minus our monotonic one
    _watch: RedisWatch = field(init=False)

    def __post_init__(self) -> None:
        self._stages = self.settings.stages
        self._cell = CellSettings.of(self.settings)
        self._watch = RedisWatch(self.metrics.redis_errors)

    def run(self, stop: threading.Event) -> None:
        """Tick until `stop`. Trouble with Redis: say so, wait with backoff, go on.

        Raises UsageError when, at the start, a Redis says that it will never serve us like this.
        """
        wait_for_redis(self._look, self._trouble, give_up=stop.is_set)
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
        self._away = str(error)
        self._last_tick = float("-inf")

    def _tick_until(self, stop: threading.Event) -> None:
        attempt = 0
        while not stop.is_set():
            try:
                self.tick()
            except RedisTrouble as error:
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
        self._judge_contact()
        self._declare_dead()  # first: whatever Redis stands still for before it would make beats look old
        self._agree()
        workers = registry.read_workers(self.link.client, self.link.keys, self.model)
        plan = self._publish_plan(workers)
        self._sweep(workers)
        if time.monotonic() - self._last_look >= LOOK_S:
            self._rescue()
            self._gauge(workers, plan, self._migrate())
            self._last_look = time.monotonic()
        self._away = ""
        self._last_tick = started  # its start: a round in which Redis stood still must look long

    def gaps(self) -> list[str]:
        """Why the scheduler does not do its work right now; empty when it does."""
        if self._away:
            return [self._away]
        late = time.monotonic() - self._last_tick
        return [f"the loop has not come round for {late:.0f} s"] if late > 10 + self.settings.tick_s else []

    def _agree(self) -> None:
        """On what holds for the whole cell: the values of the scheduler that began last, whatever Redis forgets."""
        found = read_cell_settings(self.link.client, self.link.keys) if self._began else None
        if found is None:
            publish_cell_settings(self.link.client, self.link.keys, self._cell)
        elif found != self._cell:
            found.tell(CellSettings.of(self.settings))
            self._cell = found
        self._began = True

    @property
    def _dead_after_s(self) -> float:
        return self._cell.dead_after_ms / 1000

    def _judge_contact(self) -> None:
        """While Redis was away nobody could beat: the silence of workers counts from now on."""
        if time.monotonic() - self._last_tick > self.settings.tick_s + self._dead_after_s / 2:
            self._distrust()

    def _distrust(self) -> None:
        self.trusted_from = time.monotonic() + self._dead_after_s

    def _declare_dead(self) -> None:
        if time.monotonic() < self.trusted_from:
            return
        head = self.link.client.pipeline(transaction=False)
        head.zrange(self.link.keys.workers, 0, -1, withscores=True)
        head.time()
        # Changes nothing, and fails where Redis takes no beats: then the silence of workers means nothing.
        head.zadd(self.link.keys.workers, {"": 0}, xx=True)
        asked = time.monotonic()
        beats, now, _ = cast(Any, head.execute())
        if time.monotonic() - asked > self._dead_after_s / 2:
            self._distrust()  # Redis stood still: the beats of that time are still on their way
            return
        now_ms = now[0] * 1000 + now[1] // 1000
        if self._clock_stepped(now_ms):
            self._distrust()  # until everybody has beaten, and moved, by the new time
            self._last_look = self.trusted_from
            return
        silent_ms = {worker.decode(): now_ms - int(beat) for worker, beat in beats}
        for worker in dead_workers(silent_ms, dead_after_ms=self._cell.dead_after_ms):
            died, reruns = self.link.scripts.run(calls.dead(worker, silent_s=self._dead_after_s))
            if died:
                self._dead.add(worker)
                self.metrics.deaths.inc()
                self.metrics.reruns.labels("death").inc(reruns)
                logs.get().warning("WORKER_DEAD", worker=worker, silent_ms=silent_ms[worker], reruns=reruns)

    def _clock_stepped(self, now_ms: int) -> bool:
        """Whether Redis' clock, which dates the beats, was set anew since the last look."""
        ahead_ms = now_ms - time.monotonic() * 1000
        stepped = abs(ahead_ms - self._clock_ahead_ms) > self._cell.dead_after_ms / 2
        if stepped and self._clock_ahead_ms:
            logs.get().warning("CLOCK_STEPPED", seconds=round((ahead_ms - self._clock_ahead_ms) / 1000, 1))
        self._clock_ahead_ms = ahead_ms
        return stepped

    def _publish_plan(self, workers: list[WorkerInfo]) -> Plan:
        """The plan in force afterwards."""
        fields = cast(dict[bytes, bytes], self.link.client.hgetall(self.link.keys.plan(self.model)))
        current = Plan.from_redis(fields)
        self._yield_to(current)
        deserted = self._deserted(workers, current)
        decision = decide(workers, blocks=self.blocks, stages=self._stages, current=current, deserted=deserted)
        if current and fields.get(b"inputs", b"").decode() == decision.inputs:
            return current
        replaces = current.epoch if current else 0
        publish = calls.publish_plan(
            self.model,
            replaces_epoch=replaces,
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
        """Schedulers that were given different numbers of stages must not overwrite each other for ever.

        Who has published a plan goes along with the number of a later one: the scheduler that began last decides.
        """
        if current is None or self._published is None or current.epoch <= self._published:
            return
        stages = len(parse_split(current.split))
        if stages != self._stages:
            logs.get().warning("STAGES_CHANGED_ELSEWHERE", ours=self._stages, theirs=stages, epoch=current.epoch)
            self._stages = stages

    def _deserted(self, workers: list[WorkerInfo], plan: Plan | None) -> frozenset[int]:
        """Stages that have been empty for longer than a replacement takes to come."""
        now = time.monotonic()
        empty = empty_stages(workers, plan) if plan and now >= self.trusted_from else frozenset[int]()
        self._empty_since = {stage: self._empty_since.get(stage, now) for stage in empty}
        return frozenset(s for s, since in self._empty_since.items() if now - since > self.settings.vacancy_s)

    def _sweep(self, workers: list[WorkerInfo]) -> None:
        """Rows of whoever left the registry, no matter who declared it dead."""
        present = frozenset(w.id for w in workers)
        if self._sweeper is not None:
            self._sweeper.sweep(self._without_record((self._seen | self._dead) - present))
        self._seen = present
        self._dead.clear()

    def _without_record(self, workers: frozenset[str]) -> frozenset[str]:
        """Those that have none: nobody who lives is without."""
        ask = self.link.client.pipeline(transaction=False)
        for worker in (names := sorted(workers)):
            ask.exists(self.link.keys.worker(worker))
        return frozenset(name for name, known in zip(names, ask.execute(), strict=True) if not known)

    def _rescue(self) -> None:
        requests = self._unfinished()
        found = rescues(
            requests,
            stalled_after_s=self.settings.stalled_after_s,
            prompt_tokens_per_s=self.settings.prompt_tokens_per_s,
        )
        for rescue in found:
            log = logs.get().bind(request_id=rescue.request)
            if rescue.act == "expire":
                if self.link.scripts.run(calls.finish(rescue.request, "expired")) == "FINISHED":
                    log.info("REQUEST_EXPIRED")
            elif self.link.scripts.run(calls.rerun(rescue.request, rescue.run, "stalled")):
                self.metrics.reruns.labels("stalled").inc()
                log.warning("REQUEST_STALLED", run=rescue.run)

    def _unfinished(self) -> list[UnfinishedRequest]:
        """Unfinished requests that have not moved for a while; prompts are read only of those that may be stuck.

        One look takes some of them, whatever their age: behind any number that wait stands one that is stuck.
        """
        client, keys = self.link.client, self.link.keys
        seconds, micros = cast(Any, client.time())
        now_ms = seconds * 1000 + micros // 1000
        for member in cast(list[bytes], client.zrangebyscore(keys.running, now_ms + 1000, "+inf", 0, LOOK_LIMIT)):
            client.zadd(keys.running, {member: now_ms}, xx=True, lt=True)  # the clock was put back
        found = cast(Any, client.zscan(keys.running, self._look_from, count=LOOK_LIMIT))
        self._look_from, members = found
        idle = [(member, moved_ms) for member, moved_ms in members if moved_ms <= now_ms - 1000]
        ask = client.pipeline(transaction=False)
        for member, _ in idle:
            ask.hmget(keys.request(member.decode()), "state", "run", "n", "deadline")
        requests: list[UnfinishedRequest] = []
        for (member, moved_ms), (state, run, n, deadline) in zip(idle, ask.execute(), strict=True):
            request, idle_ms = member.decode(), now_ms - int(moved_ms)
            tokens = 0
            if state == b"running" and idle_ms > 1000 * self.settings.stalled_after_s:
                body = cast(bytes | None, client.hget(keys.request(request), "body"))
                tokens = int(n or 0) + (RequestBody.decode(body).prompt.size if body else 0)
            requests.append(
                UnfinishedRequest(
                    id=request,
                    state=(state or b"").decode(),
                    run=(run or b"").decode(),
                    idle_ms=idle_ms,
                    tokens=tokens,
                    overdue_ms=now_ms - int(deadline) if deadline and int(deadline) else None,
                )
            )
        return requests

    def _migrate(self) -> list[calls.Awaited]:
        """Let go what has waited too long for a numerics id that nobody serves; what waits for one afterwards."""
        call = calls.migrate(
            self.model, dead_after_s=self.settings.dead_after_s, patience_s=self.settings.numerics_wait_s
        )
        found = self.link.scripts.run(call)
        for one in found:
            if one.freed:
                logs.get().warning(
                    "NUMERICS_GONE", numerics=one.numerics, requests=one.freed, without_worker_s=one.absent_s
                )
        return found

    def _gauge(self, workers: list[WorkerInfo], plan: Plan, awaited: list[calls.Awaited]) -> None:
        client, keys = self.link.client, self.link.keys
        states = Counter((w.device, _state(w)) for w in workers)
        for device in ("cpu", "gpu"):
            for state in ("loading", "ready", "draining", "silent"):
                self.metrics.workers.labels(device, state).set(states[device, state])
        self.metrics.plan_epoch.set(plan.epoch)
        streams = [(name, route_class) for name in ("jobs", "reruns") for route_class in ("cpu", "gpu")]
        ask = client.pipeline(transaction=False)
        ask.zcard(keys.running)
        for name, route_class in streams:
            if name == "jobs":
                ask.zcard(keys.queue(self.model, route_class))
            else:
                ask.xlen(keys.reruns(self.model, route_class))
        ask.llen(keys.ended("first"))
        ask.llen(keys.ended("last"))
        in_flight, *depths, first, last = cast(list[int], ask.execute())
        self.metrics.ended.set(first + last)
        self.metrics.in_flight.set(in_flight)
        for (name, route_class), depth in zip(streams, depths, strict=True):
            pinned = sum(a.waiting for a in awaited if name == "reruns" and a.route_class == route_class)
            self.metrics.queue_depth.labels(f"{name}:{route_class}").set(depth + pinned)
        self.metrics.without_numerics.set(sum(a.waiting for a in awaited if a.absent_s is not None))


def _state(worker: WorkerInfo) -> str:
    if not worker.is_alive:
        return "silent"
    if worker.draining:
        return "draining"
    return "ready" if worker.ready else "loading"
