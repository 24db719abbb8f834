"""What the scheduler's metrics say of a whole model: workers, queues, requests that wait."""

from collections import Counter
from collections.abc import Sequence
from typing import cast

from blockrelay.observability.metrics import SchedulerMetrics
from blockrelay.protocol.plan import WORKER_STATES, Plan, WorkerInfo, parse_split
from blockrelay.protocol.transitions import calls
from blockrelay_scheduler.link import Link


def set_gauges(
    link: Link,
    metrics: SchedulerMetrics,
    model: str,
    workers: Sequence[WorkerInfo],
    plan: Plan,
    awaited: Sequence[calls.Awaited],
) -> None:
    """Set all gauges; `awaited` are requests that wait for a numerics id. Raises RedisTrouble."""
    client, keys = link.client, link.keys
    states = Counter((worker.device, worker.state) for worker in workers)
    for device in ("cpu", "gpu"):
        for state in WORKER_STATES:
            metrics.workers.labels(device, state).set(states[device, state])
    metrics.plan_epoch.set(plan.epoch)
    metrics.stage_workers.clear()  # those of another split
    for index, stage in enumerate(parse_split(plan.split)):
        serving = [w for w in workers if w.state == "ready" and (w.split, w.stage) == (plan.split, index)]
        for device in ("cpu", "gpu"):
            count = sum(worker.device == device for worker in serving)
            metrics.stage_workers.labels(str(index), f"{stage.first}-{stage.last}", device).set(count)
    streams = [(name, route_class) for name in ("jobs", "reruns") for route_class in ("cpu", "gpu")]
    ask = client.pipeline(transaction=False)
    ask.zcard(keys.running)
    for name, route_class in streams:
        if name == "jobs":
            ask.zcard(keys.queue(model, route_class))
        else:
            ask.xlen(keys.reruns(model, route_class))
    ask.llen(keys.ended("first"))
    ask.llen(keys.ended("last"))
    in_flight, *depths, first, last = cast(list[int], ask.execute())
    metrics.ended.set(first + last)
    metrics.in_flight.set(in_flight)
    for (name, route_class), depth in zip(streams, depths, strict=True):
        pinned = sum(a.waiting for a in awaited if name == "reruns" and a.route_class == route_class)
        metrics.queue_depth.labels(f"{name}:{route_class}").set(depth + pinned)
    metrics.without_numerics.set(sum(a.waiting for a in awaited if a.absent_s is not None))
