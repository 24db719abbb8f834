"""The books of a cell, as Redis keeps them: counters that no process's end sets back."""

from collections.abc import Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from blockrelay.protocol.messages import EndReason


class Totals(Collector):
    """How many requests the cell has accepted and ended since it began, and how many it has in flight.

    All are of one moment, so that the first is the sum of the others. Nothing is told before `set`: a counter that
    begins at 0 in a scheduler that has not looked yet would read as a loss.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._books: tuple[int, Mapping[str, int], int] | None = None
        registry.register(self)

    def set(self, accepted: int, ended: Mapping[str, int], in_flight: int) -> None:
        """`ended` by reason."""
        self._books = accepted, ended, in_flight

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        accepted = CounterMetricFamily("blockrelay_accepted", "How many requests the cell has accepted")
        ended = CounterMetricFamily(
            "blockrelay_ended",
            "How many requests of the cell have ended, by reason; with those in flight they are the accepted ones",
            labels=["reason"],
        )
        running = GaugeMetricFamily("blockrelay_requests_in_flight", "How many requests are accepted and unfinished")
        if self._books is not None:
            accepted.add_metric([], self._books[0])
            for reason in get_args(EndReason):
                ended.add_metric([reason], self._books[1].get(reason, 0))
            running.add_metric([], self._books[2])
        yield from (accepted, ended, running)
