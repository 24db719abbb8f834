"""Sets the scheduler's metrics of a whole model: workers, queues, waiting requests, accounting, workers wanted."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.protocol.plan import DEVICES, WORKER_STATES, Plan, WorkerInfo, parse_split
from blockrelay.protocol.transitions import calls
from blockrelay.redis.registry import read_accounting, read_oldest
from blockrelay.settings import SchedulerSettings
from blockrelay_scheduler.cell_metrics.autoscaling import Outstanding, demand, workers_wanted
from blockrelay_scheduler.link import SchedulerLinks

#: Each kind of queue with each route class.
_STREAMS = [(name, route_class) for name in ("jobs", "reruns") for route_class in DEVICES]


def set_gauges(
    link: SchedulerLinks,
    metrics: SchedulerMetrics,
    settings: SchedulerSettings,
    model: str,
    workers: Sequence[WorkerInfo],
    plan: Plan,
    awaited: Sequence[calls.Awaited],
) -> None:
    """Reads the state of the model and its cell from Redis and sets all gauges. Raises RedisTrouble.

    `model` is the model's key in Redis, `workers` are its registered workers, and `plan` is its plan in force.
    `awaited` counts the requests that wait for a worker of a numerics id.
    """
    _set_workers(metrics, workers, plan)
    client, keys = link.client, link.keys
    ask = client.pipeline(transaction=False)
    for name, route_class in _STREAMS:
        if name == "jobs":
            ask.zcard(keys.queue(model, route_class))
        else:
            ask.xlen(keys.reruns(model, route_class))
    ask.llen(keys.ended("first"))
    ask.llen(keys.ended("last"))
    ask.xlen(keys.dead_letters)
    ask.hgetall(keys.outstanding(model))
    accounting, oldest = read_accounting(client, keys, model), read_oldest(client, keys)
    *depths, first, last, letters, outstanding = cast(Any, ask.execute())
    metrics.totals.set(accounting)
    metrics.ended.set(first + last)
    metrics.dead_letters.set(letters)
    metrics.oldest_waiting.set(oldest[1] if oldest else 0)
    for (name, route_class), depth in zip(_STREAMS, depths, strict=True):
        pinned = sum(a.waiting for a in awaited if name == "reruns" and a.route_class == route_class)
        metrics.queue_depth.labels(f"{name}:{route_class}").set(depth + pinned)
    metrics.without_numerics.set(sum(a.waiting for a in awaited if a.absent_s is not None))
    _set_demand(metrics, settings, accounting.in_flight, Outstanding.from_redis(outstanding), workers, plan)


def _set_workers(metrics: SchedulerMetrics, workers: Sequence[WorkerInfo], plan: Plan) -> None:
    """Sets the gauges of workers by state, of the plan's epoch, and of the ready workers of each stage."""
    states = Counter((worker.device, worker.state) for worker in workers)
    for device in DEVICES:
        for state in WORKER_STATES:
            metrics.workers.labels(device, state).set(states[device, state])
    metrics.plan_epoch.set(plan.epoch)
    metrics.stage_workers.clear()  # stages of an earlier split must not stay
    for index, stage in enumerate(parse_split(plan.split)):
        serving = [w for w in workers if w.state == "ready" and (w.split, w.stage) == (plan.split, index)]
        for device in DEVICES:
            count = sum(worker.device == device for worker in serving)
            metrics.stage_workers.labels(str(index), f"{stage.first}-{stage.last}", device).set(count)


def _set_demand(
    metrics: SchedulerMetrics,
    settings: SchedulerSettings,
    unfinished: int,
    outstanding: Outstanding,
    workers: Sequence[WorkerInfo],
    plan: Plan,
) -> None:
    """Sets the gauges of the backlog (seconds) and of the workers wanted."""
    load = demand(unfinished, outstanding, workers, plan)
    routes = sum(w.is_alive and w.ready and w.stage == 0 and not w.draining for w in workers)
    metrics.backlog.set((load.route_s or 0.0) / max(1, routes))
    wanted = workers_wanted(load, workers, plan, target_s=settings.target_backlog_s, spare=settings.spare_workers)
    for device, count in wanted.items():
        metrics.workers_wanted.labels(device).set(count)
