"""Parts that the metrics of several services share: histogram buckets, and the making of instruments."""

from collections.abc import Sequence
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from blockrelay.observability.histograms import ThreadCounter

#: vLLM's buckets for time to first token, and finer ones for a step. Seconds.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
#: vLLM's buckets for whole requests, in seconds: the bundled model's take seconds, long answers of a large one half an
#: hour.
REQUEST_BUCKETS = (
    0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
#: For one block and one batch, in seconds. A block of a large model with a long prompt takes seconds on CPUs.
BLOCK_BUCKETS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30,
)  # fmt: skip
#: For the number of tokens of a prompt or an answer.
LENGTH_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip
#: For the number of tokens in a batch.
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
#: Labels of fallbacks and their values: device classes between which a block may move in mid-request, and why.
FALLBACK = {"from": ("GPU",), "to": ("CPU",), "reason": ("gpu_error",)}


class Instruments:
    """Creates Prometheus instruments in one registry. Each method takes the metric's name and its help text."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *later: str, **values: Sequence[str]) -> Counter:
        """Creates a counter. `values` has the possible values of a label by its name.

        `later` are further labels, before those of `values`, whose values are not known yet. Without them, each
        combination of values has a series at 0 from the beginning.
        """
        made = Counter(name, text, [*later, *values], registry=self._registry)
        for combination in product(*values.values()) if values and not later else ():
            made.labels(*combination)
        return made

    def fallbacks(self, name: str, text: str) -> Counter:
        """Creates a counter of fallbacks, by block, device classes and reason. `expect_blocks` creates its series."""
        return self.counter(name, text, "block", **FALLBACK)

    def thread_counter(self, name: str, text: str) -> ThreadCounter:
        """Creates a counter that one thread increments."""
        return ThreadCounter(name, text, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Creates a gauge."""
        return Gauge(name, text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        """Creates a histogram; `buckets` are upper bounds without infinity."""
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)


def expect_blocks(counts: Counter, first: int, last: int) -> None:
    """Creates the series of `counts`, a counter of fallbacks, for the blocks `first` to `last`, both included."""
    for block, *others in product(range(first, last + 1), *FALLBACK.values()):
        counts.labels(f"block_{block}", *others)


def redis_errors(registry: CollectorRegistry) -> Counter:
    """Creates the counter of this process's failed calls to Redis."""
    return Instruments(registry).counter("blockrelay_redis_errors", "Times that Redis could not be reached")
