"""Histograms and counters without locks, each updated by one thread only.

`prometheus_client.Histogram` takes two locks for every value. A worker observes one value for each block after every
step; with those locks that would be a tenth of its work between two steps.
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
    """Values of one combination of labels."""

    counts: list[int]  # values in each bucket; the last bucket has no upper bound
    total: float = 0.0


class Histograms(Collector):
    """One Prometheus histogram that takes values for many values of its first label in one call.

    Only one thread may call `observe`. A scrape at the same time may see a part of the values of a call.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`text`: the help text. `labels`: the label names. `buckets`: upper bounds, ascending, without infinity."""
        self._name, self._text, self._labels, self._bounds = name, text, tuple(labels), tuple(buckets)
        self._series: dict[tuple[str, ...], dict[str, _Series]] = {}
        registry.register(self)

    def expect(self, labels: Iterable[str], *others: str) -> None:
        """Creates empty series for `labels`, values of the first label, with `others` as values of the other labels."""
        series = self._series.setdefault(others, {})
        for label in labels:
            series.setdefault(label, _Series([0] * (len(self._bounds) + 1)))

    def observe(self, values: Mapping[str, float], *others: str) -> None:
        """Adds `values`, one for each value of the first label, with `others` as values of the other labels."""
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
    """A Prometheus counter without labels and without a lock: only one thread may call `inc`."""

    def __init__(self, name: str, text: str, *, registry: CollectorRegistry) -> None:
        """`text`: the help text."""
        self._name, self._text, self._value = name, text, 0.0
        registry.register(self)

    def inc(self, amount: float = 1.0) -> None:
        """Adds `amount`, which is not negative."""
        self._value += amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._text, value=self._value)
