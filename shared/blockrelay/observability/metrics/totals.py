"""The books of a cell, as Redis keeps them: counters that no process's end sets back."""

from collections.abc import Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from blockrelay.protocol.messages import EndReason, RerunReason


class Totals(Collector):
    """How many requests the cell has accepted and ended since it began, and how many it has in flight; how often
    workers died and runs began again, whoever noticed it: a scheduler, a launcher, a worker.

    All are of one moment, so that the first is the sum of the next two. Nothing is told before `set`: a counter that
    begins at 0 in a scheduler that has not looked yet would read as a loss.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._books: tuple[int, Mapping[str, int], int] | None = None
        self._deaths, self._reruns = 0, dict[str, int]()
        registry.register(self)

    def set(
        self, accepted: int, ended: Mapping[str, int], in_flight: int, *, deaths: int, reruns: Mapping[str, int]
    ) -> None:
        """`ended` and `reruns` by reason."""
        self._books, self._deaths, self._reruns = (accepted, ended, in_flight), deaths, dict(reruns)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        accepted = CounterMetricFamily("blockrelay_accepted", "How many requests the cell has accepted (kept by Redis)")
        ended = CounterMetricFamily(
            "blockrelay_ended",
            "How many requests of the cell have ended, by reason (kept by Redis); with those in flight they are the "
            "accepted ones",
            labels=["reason"],
        )
        running = GaugeMetricFamily("blockrelay_requests_in_flight", "How many requests are accepted and unfinished")
        deaths = CounterMetricFamily(
            "blockrelay_worker_deaths", "How many workers of the cell were declared dead (kept by Redis)"
        )
        reruns = CounterMetricFamily(
            "blockrelay_reruns",
            "How many runs of the cell were ended and queued again, by reason (kept by Redis)",
            labels=["reason"],
        )
        if self._books is not None:
            accepted.add_metric([], self._books[0])
            for reason in get_args(EndReason):
                ended.add_metric([reason], self._books[1].get(reason, 0))
            running.add_metric([], self._books[2])
            deaths.add_metric([], self._deaths)
            for reason in get_args(RerunReason):
                reruns.add_metric([reason], self._reruns.get(reason, 0))
        yield from (accepted, ended, running, deaths, reruns)
