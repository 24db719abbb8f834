"""Histograms of many label values that one thread observes together, and counters that one thread counts.

`prometheus_client.Histogram` takes two locks for every value: for each block of a model, after every step, that is a
tenth of what a worker does between two steps.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


@dataclass(slots=True)
class _Series:
    counts: list[int]  # by bucket, the last one without a bound
    total: float = 0.0


class Histograms(Collector):
    """One histogram, with a series for each value of its first label and, given with every call, its others.

    `observe` belongs to one thread; a scrape beside it may see a part of its values.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`buckets`: upper bounds, ascending, without the infinite one."""
        self._name, self._text, self._labels, self._bounds = name, text, tuple(labels), tuple(buckets)
        self._series: dict[tuple[str, ...], dict[str, _Series]] = {}
        registry.register(self)

    def expect(self, labels: Iterable[str], *others: str) -> None:
        """Make the series for these values of the first label, without a value yet."""
        series = self._series.setdefault(others, {})
        for label in labels:
            series.setdefault(label, _Series([0] * (len(self._bounds) + 1)))

    def observe(self, values: Mapping[str, float], *others: str) -> None:
        """One value for each label value."""
        series, bounds = self._series.setdefault(others, {}), self._bounds
        for label, value in values.items():
            one = series.get(label)
            if one is None:
                one = series[label] = _Series([0] * (len(bounds) + 1))
            one.counts[bisect_left(bounds, value)] += 1
            one.total += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for others, series in list(self._series.items()):
            for label, one in list(series.items()):
                buckets = list(zip(names, map(float, accumulate(one.counts)), strict=True))
                family.add_metric([label, *others], buckets, one.total)
        yield family


class ThreadCounter(Collector):
    """A counter without a lock, for one thread that counts at every step."""

    def __init__(self, name: str, text: str, *, registry: CollectorRegistry) -> None:
        self._name, self._text, self._value = name, text, 0.0
        registry.register(self)

    def inc(self, amount: float = 1.0) -> None:
        self._value += amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._text, value=self._value)
