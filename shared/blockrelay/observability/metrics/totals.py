"""The accounting of a cell as metrics: counters kept in Redis, which no restart of a process sets back."""

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from blockrelay.protocol.messages import EndReason, RerunReason
from blockrelay.redis.registry import Accounting


class Totals(Collector):
    """Exports the cell's counts of accepted and ended requests, deaths of workers and re-runs, and those in flight.

    The counts run since the cell began, whichever process noticed the event. All values are of one moment. So in a cell
    of one model, accepted requests are the sum of ended ones and those in flight. Nothing is exported before `set`: a
    counter at 0 from a scheduler that has not read Redis yet would look like a reset.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._accounting: Accounting | None = None
        registry.register(self)

    def set(self, accounting: Accounting) -> None:
        """Sets the values to export. A reason that is missing counts as 0."""
        self._accounting = accounting

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        accepted = CounterMetricFamily(
            "blockrelay_accepted", "Requests that the cell has accepted since it began (kept by Redis)"
        )
        ended = CounterMetricFamily(
            "blockrelay_ended",
            "Requests of the cell that have ended since it began, by reason (kept by Redis); with those in flight they "
            "are the accepted ones",
            labels=["reason"],
        )
        running = GaugeMetricFamily("blockrelay_requests_in_flight", "Requests that are accepted and unfinished")
        deaths = CounterMetricFamily(
            "blockrelay_worker_deaths", "Workers of the cell that were declared dead since it began (kept by Redis)"
        )
        reruns = CounterMetricFamily(
            "blockrelay_reruns",
            "Runs of the cell that were ended and queued again since it began, by reason (kept by Redis)",
            labels=["reason"],
        )
        if (totals := self._accounting) is not None:
            accepted.add_metric([], totals.accepted)
            for reason in get_args(EndReason):
                ended.add_metric([reason], totals.ended.get(reason, 0))
            running.add_metric([], totals.in_flight)
            deaths.add_metric([], totals.deaths)
            for reason in get_args(RerunReason):
                reruns.add_metric([reason], totals.reruns.get(reason, 0))
        yield from (accepted, ended, running, deaths, reruns)
