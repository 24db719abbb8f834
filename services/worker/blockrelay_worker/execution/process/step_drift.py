"""Whether a device has become slower than it was at the same work. Pure.

A step is compared with steps of as many rows and sequences, and about as much context, alone: medians of the first so
many and of the latest so many. One that has grown by half is helped by a clean-up of the device; where that does not
help, its process has to be renewed.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from blockrelay_worker.execution.batch import Segment

#: So many steps of one shape are a sample; so many shapes are remembered, those that came last.
SAMPLE, SHAPES = 32, 64
#: By how much a median may have grown.
GROWN = 1.5
#: Contexts count as equal within a ninth.
_PARTS_OF_A_DOUBLING = 6

Remedy = Literal["clean_up", "renewal"]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides how long a step takes. `context`: positions of all sequences together, by its magnitude."""

    rows: int
    sequences: int
    context: int


def shape_of(segments: Sequence[Segment]) -> StepShape:
    """The shape of a batch of these segments, at least one."""
    positions = sum(segment.first_position + segment.rows for segment in segments)
    magnitude = round(_PARTS_OF_A_DOUBLING * math.log2(positions))
    return StepShape(sum(segment.rows for segment in segments), len(segments), magnitude)


def has_grown(first: Sequence[float], latest: Sequence[float]) -> bool:
    """Whether the median of the latest is half as much again."""
    return median(latest) >= GROWN * median(first)


@dataclass(slots=True)
class _Times:
    """Seconds: the first sample, never changed, and the one that is being taken."""

    first: list[float] = field(default_factory=list[float])
    latest: list[float] = field(default_factory=list[float])


class StepDrift:
    """The steps of one device since its stage was loaded. `due` is what it needs, until it `was_cleaned`."""

    def __init__(self) -> None:
        self._times: OrderedDict[StepShape, _Times] = OrderedDict()
        self._cleaned_for: StepShape | None = None
        self.due: Remedy | None = None

    def add(self, shape: StepShape, seconds: float) -> None:
        """A step that took so long."""
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
        """What is slow from now on is slow in spite of that."""
        self.due = None
        for times in self._times.values():
            times.latest.clear()

    def _judge(self, shape: StepShape, grown: bool) -> None:
        if grown and self._cleaned_for is None:
            self.due, self._cleaned_for = "clean_up", shape
        elif grown and self.due is None:
            self.due = "renewal"
        elif not grown and shape == self._cleaned_for and self.due is None:
            self._cleaned_for = None  # that has helped
