"""Seconds that were measured again and again: how often, and what is made of them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median, quantiles

#: Runs of a round: at least, and until so many seconds have gone.
LEAST_RUNS, ROUND_S = 5, 0.25
#: Rounds over everything, so that a slow moment of the machine meets all of it.
ROUNDS = 3


@dataclass(slots=True)
class Samples:
    """What was measured of one thing. Seconds."""

    seconds: list[float] = field(default_factory=list[float])

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median; of two samples at least."""
        low, middle, high = quantiles(self.seconds, n=4)
        return (high - low) / 2 / middle


def runs_of_a_round() -> Iterator[None]:
    """One for each run."""
    until, runs = time.perf_counter() + ROUND_S, 0
    while runs < LEAST_RUNS or time.perf_counter() < until:
        yield
        runs += 1
