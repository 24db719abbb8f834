"""Metrics of a scheduler: the gauges of its cell, and its own state."""

from prometheus_client import CollectorRegistry, Gauge

from blockrelay.observability.metrics.instruments import redis_errors
from blockrelay.observability.metrics.totals import Totals
from blockrelay.observability.states import States


class SchedulerMetrics:
    """Metrics of a scheduler. All schedulers of a cell set the gauges of the cell to the same values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.workers = Gauge(
            "blockrelay_workers", "Registered workers, by device and state", ["device", "state"], registry=registry
        )
        self.states = States(registry)
        self.plan_epoch = Gauge("blockrelay_plan_epoch", "Epoch of the plan in force", registry=registry)
        self.stage_workers = Gauge(
            "blockrelay_stage_workers",
            "Ready workers of each stage of the plan, by the stage's blocks and the workers' device",
            ["stage", "blocks", "device"],
            registry=registry,
        )
        self.totals = Totals(registry)
        self.ended = Gauge(
            "blockrelay_ended_requests", "Requests that have ended and can still be read", registry=registry
        )
        self.queue_depth = Gauge(
            "blockrelay_queue_depth", "Jobs that wait, by queue and class of route", ["stream"], registry=registry
        )
        self.without_numerics = Gauge(
            "blockrelay_requests_without_numerics",
            "Re-runs that wait for a worker of their numerics id while there is none",
            registry=registry,
        )
        self.oldest_waiting = Gauge(
            "blockrelay_oldest_waiting_seconds",
            "Time without progress of the unfinished request that has waited longest",
            registry=registry,
        )
        self.backlog = Gauge(
            "blockrelay_backlog_seconds",
            "Time that the present workers need for all unfinished requests, by their own measurements",
            registry=registry,
        )
        self.workers_wanted = Gauge(
            "blockrelay_workers_wanted",
            "Workers that the unfinished requests need, by device (docs/operations.md)",
            ["device"],
            registry=registry,
        )
        self.dead_letters = Gauge(
            "blockrelay_dead_letters",
            "Dead letters that are kept: requests that ended their workers or could not be computed",
            registry=registry,
        )
        self.redis_errors = redis_errors(registry)
