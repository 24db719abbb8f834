"""What a scheduler tells: the gauges of its cell, and what it has done."""

from prometheus_client import CollectorRegistry, Gauge

from blockrelay.observability.metrics.instruments import redis_errors
from blockrelay.observability.metrics.totals import Totals
from blockrelay.observability.states import States


class SchedulerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.workers = Gauge(
            "blockrelay_workers", "How many workers, by device and state", ["device", "state"], registry=registry
        )
        self.states = States(registry)
        self.plan_epoch = Gauge("blockrelay_plan_epoch", "Which plan is in force", registry=registry)
        self.stage_workers = Gauge(
            "blockrelay_stage_workers",
            "How many ready workers each stage of the plan has, by its blocks and their device",
            ["stage", "blocks", "device"],
            registry=registry,
        )
        self.totals = Totals(registry)
        self.ended = Gauge(
            "blockrelay_ended_requests", "How many requests have ended and can still be read", registry=registry
        )
        self.queue_depth = Gauge(
            "blockrelay_queue_depth", "How many jobs wait, by stream", ["stream"], registry=registry
        )
        self.without_numerics = Gauge(
            "blockrelay_requests_without_numerics",
            "How many re-runs wait for a worker of their numerics id while none is left",
            registry=registry,
        )
        self.oldest_waiting = Gauge(
            "blockrelay_oldest_waiting_seconds",
            "For how long the unfinished request that has stood still longest has made no progress",
            registry=registry,
        )
        self.backlog = Gauge(
            "blockrelay_backlog_seconds",
            "How long the workers that there are need for all unfinished requests, by their own measure",
            registry=registry,
        )
        self.workers_wanted = Gauge(
            "blockrelay_workers_wanted",
            "How many workers the unfinished requests call for, by device (docs/operations.md)",
            ["device"],
            registry=registry,
        )
        self.dead_letters = Gauge(
            "blockrelay_dead_letters",
            "How many dead letters are kept: requests that ended their workers or could not be computed",
            registry=registry,
        )
        self.redis_errors = redis_errors(registry)
