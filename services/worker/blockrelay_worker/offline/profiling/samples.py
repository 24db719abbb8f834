"""Repeated time measurements: how often they are repeated, and their median and spread."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median, quantiles

#: Minimum number of runs in a round, and its minimum duration in seconds.
LEAST_RUNS, ROUND_S = 5, 0.25
#: Number of rounds over everything: a slow moment of the machine then affects few samples of each thing.
ROUNDS = 3


@dataclass(slots=True)
class Samples:
    """The measurements of one thing, in seconds."""

    seconds: list[float] = field(default_factory=list[float])

    @property
    def median(self) -> float:
        """The median in seconds; needs at least one sample."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median; needs at least two samples."""
        low, middle, high = quantiles(self.seconds, n=4)
        return (high - low) / 2 / middle


def runs_of_a_round() -> Iterator[None]:
    """Yields once for each run of a round: at least LEAST_RUNS times, and until ROUND_S seconds have passed."""
    until, runs = time.perf_counter() + ROUND_S, 0
    while runs < LEAST_RUNS or time.perf_counter() < until:
        yield
        runs += 1
