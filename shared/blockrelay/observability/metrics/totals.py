"""The books of a cell, as Redis keeps them: counters that no process's end sets back."""

from collections.abc import Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from blockrelay.protocol.messages import EndReason


class Totals(Collector):
    """How many requests the cell has accepted and ended since it began. `set` before they are told at all: a counter
    that begins at 0 in a scheduler that has not looked yet would read as a loss."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._accepted: int | None = None
        self._ended: Mapping[str, int] = {}
        registry.register(self)

    def set(self, accepted: int, ended: Mapping[str, int]) -> None:
        """`ended` by reason."""
        self._accepted, self._ended = accepted, ended

    def collect(self) -> Iterator[CounterMetricFamily]:
        accepted = CounterMetricFamily("blockrelay_accepted", "How many requests the cell has accepted")
        ended = CounterMetricFamily(
            "blockrelay_ended",
            "How many requests of the cell have ended, by reason; with those in flight they are the accepted ones",
            labels=["reason"],
        )
        if self._accepted is not None:
            accepted.add_metric([], self._accepted)
            for reason in get_args(EndReason):
                ended.add_metric([reason], self._ended.get(reason, 0))
        yield accepted
        yield ended
