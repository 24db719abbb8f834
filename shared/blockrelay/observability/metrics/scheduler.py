"""Metrics of a scheduler: the gauges of its cell, and its own state."""

from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.instruments import Instruments, redis_errors
from blockrelay.observability.metrics.totals import Totals
from blockrelay.observability.states import States


class SchedulerMetrics:
    """Metrics of a scheduler. All schedulers of a cell set its gauges to the same values: take the maximum."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        make = Instruments(registry)
        self.workers = make.gauge("blockrelay_workers", "Registered workers, by device and state", "device", "state")
        self.states = States(registry)
        self.plan_epoch = make.gauge("blockrelay_plan_epoch", "Epoch of the plan in force")
        self.stage_workers = make.gauge(
            "blockrelay_stage_workers",
            "Ready workers of each stage of the plan, by the stage's blocks and the workers' device",
            "stage",
            "blocks",
            "device",
        )
        self.plan_predicted = make.gauge(
            "blockrelay_plan_predicted_seconds",
            "Time of a block in decode steps such as the observed ones, by the profile that the plan was made from",
            "block",
            "device",
        )
        self.plan_observed = make.gauge(
            "blockrelay_plan_observed_seconds",
            "Time of a block in the decode steps of the last seconds, as its workers measured it",
            "block",
            "device",
        )
        self.plan_gain = make.gauge(
            "blockrelay_plan_gain_ratio",
            "Share by which steps are longer than with the best borders between the same stages, by measured times",
        )
        self.degraded = make.gauge(
            "blockrelay_precision_degraded",
            "1 while the cell serves a smaller precision than it was given, for want of memory (setting degrade)",
        )
        self.memory_changes = make.counter(
            "blockrelay_precision_changes",
            "Changes of the precision by this scheduler because of memory, by kind",
            kind=("degraded", "restored"),
        )
        self.totals = Totals(registry)
        self.ended = make.gauge("blockrelay_ended_requests", "Requests that have ended and can still be read")
        self.queue_depth = make.gauge("blockrelay_queue_depth", "Jobs that wait, by queue and class of route", "stream")
        self.without_numerics = make.gauge(
            "blockrelay_requests_without_numerics",
            "Re-runs that wait for a worker of their numerics id while there is none",
        )
        self.oldest_waiting = make.gauge(
            "blockrelay_oldest_waiting_seconds",
            "Time without progress of the unfinished request that has waited longest",
        )
        self.backlog = make.gauge(
            "blockrelay_backlog_seconds",
            "Time that the present workers need for all unfinished requests, by their own measurements",
        )
        self.workers_wanted = make.gauge(
            "blockrelay_workers_wanted",
            "Workers that the unfinished requests need, by device (docs/operations.md)",
            "device",
        )
        self.dead_letters = make.gauge(
            "blockrelay_dead_letters",
            "Dead letters that are kept: requests that ended their workers or could not be computed",
        )
        self.redis_errors = redis_errors(registry)
