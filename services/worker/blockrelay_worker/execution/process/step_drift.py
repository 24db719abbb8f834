"""Detects a device that has become slower at the same work. Pure.

A step is compared only with steps of as many tokens and sequences, and about as much context: the median of the first
SAMPLE steps with the median of the latest SAMPLE. If it has grown by half, the device is due for a clean-up; if that
does not help, its process is due for renewal.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.policy import SLOW_FACTOR

#: Steps of one shape in a sample; shapes that are remembered, the latest ones.
SAMPLE, SHAPES = 32, 64
#: Contexts within about a ninth of each other count as equal.
_PARTS_OF_A_DOUBLING = 6

Remedy = Literal["clean_up", "renewal"]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides how long a step takes.

    `context`: magnitude of the total context, 6 * log2 of the positions of all sequences together, rounded.
    """

    rows: int
    sequences: int
    context: int


def shape_of(segments: Sequence[Segment]) -> StepShape:
    """Returns the shape of a batch of these segments, at least one."""
    positions = sum(segment.first_position + segment.rows for segment in segments)
    magnitude = round(_PARTS_OF_A_DOUBLING * math.log2(positions))
    return StepShape(sum(segment.rows for segment in segments), len(segments), magnitude)


def has_grown(first: Sequence[float], latest: Sequence[float]) -> bool:
    """Returns whether the median of `latest` is SLOW_FACTOR times that of `first`, or more. Neither is empty."""
    return median(latest) >= SLOW_FACTOR * median(first)


@dataclass(slots=True)
class _Times:
    """Seconds of steps: the first sample, never changed, and the one that is being taken."""

    first: list[float] = field(default_factory=list[float])
    latest: list[float] = field(default_factory=list[float])


class StepDrift:
    """The times of one device's steps since its stage was loaded.

    `due` is the remedy that the device needs, until `was_cleaned` is called; None: nothing.
    """

    def __init__(self) -> None:
        self._times: OrderedDict[StepShape, _Times] = OrderedDict()
        self._cleaned_for: StepShape | None = None
        self.due: Remedy | None = None

    def add(self, shape: StepShape, seconds: float) -> None:
        """Adds a step of this shape that took `seconds`."""
        times = self._times.setdefault(shape, _Times())
        self._times.move_to_end(shape)
        if len(self._times) > SHAPES:
            self._times.popitem(last=False)
        if len(times.first) < SAMPLE:
            times.first.append(seconds)
            return
        times.latest.append(seconds)
        if len(times.latest) == SAMPLE:
            self._judge(shape, has_grown(times.first, times.latest))
            times.latest.clear()

    def was_cleaned(self) -> None:
        """Drops the latest sample of each shape, and keeps the first: what is slow now is so in spite of a clean-up."""
        self.due = None
        for times in self._times.values():
            times.latest.clear()

    def _judge(self, shape: StepShape, grown: bool) -> None:
        if grown and self._cleaned_for is None:
            self.due, self._cleaned_for = "clean_up", shape
        elif grown and self.due is None:
            self.due = "renewal"
        elif not grown and shape == self._cleaned_for and self.due is None:
            self._cleaned_for = None  # the clean-up has helped
