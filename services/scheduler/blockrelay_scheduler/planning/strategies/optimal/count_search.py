"""Search for the quickest stages by dynamic programming over how many devices of each kind are used. Exact.

A state is (devices used of each kind, kind of the last stage, blocks covered). The search is exact because devices of a
kind are interchangeable, and quick as long as there are few states, which `fits` checks.
"""

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from blockrelay_scheduler.planning.strategies.optimal.search_space import F64, Option, Space, Tables
from blockrelay_scheduler.policy import MAX_COMBINATIONS


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A stage of blocks `first` + 1 to `last` (1-based), on the devices of an option."""

    option: Option
    first: int
    """The block before the first one; 0 for a stage that begins with block 1."""
    last: int


def fits(space: Space) -> bool:
    """Returns whether this search is quick for a space; otherwise `PathSearch` is the one to take."""
    return prod(len(devices) + 1 for devices in space.kinds) <= MAX_COMBINATIONS


class CountSearch:
    """Finds the quickest ways through all blocks of one space, for one number of groups.

    A group is the requests that go through a stage together. `stages` is at least 1. `limit_s` must be finite: inf
    would also admit stages that do not fit, because their seconds are inf.
    """

    def __init__(self, space: Space, tables: Tables) -> None:
        self.space, self._tables = space, tables
        self._blocks = space.problem.blocks
        sizes = [len(devices) for devices in space.kinds]
        self._order = np.arange(self._blocks + 1)
        self._used = np.array(list(product(*(range(size + 1) for size in sizes))), np.int64)
        strides = np.array([prod(size + 1 for size in sizes[at + 1 :]) for at in range(len(sizes))], np.int64)
        self._steps = [option.replicas * int(strides[option.kind]) for option in space.options]
        limit = np.array(sizes)
        self._limit_s: float | None = None  # the bound for which `_layers` and `_firsts` hold
        self._layers: dict[int | None, list[F64]] = {}  # by the kind that the way begins on, one for each stage
        self._firsts: list[NDArray[np.int64]] = []  # by option: see `_first_allowed`
        self._from: list[NDArray[np.int64]] = []  # by option: the combinations with enough devices left for it
        for option in space.options:
            left = self._used[:, option.kind] + option.replicas <= limit[option.kind]
            self._from.append(np.flatnonzero(left))

    def is_possible(self, stages: int, limit_s: float) -> bool:
        """Returns whether `stages` stages can cover all blocks, each with at most `limit_s` seconds for a group."""
        allowed = [_first_allowed(table <= limit_s) for table in self._tables.seconds]
        reached = np.zeros((self._blocks + 1, len(self._used)), np.bool_)
        reached[0, 0] = True
        for _ in range(stages):
            # Index i: how many blocks before i are reached. A difference says whether any between two indices is.
            counts = np.zeros((self._blocks + 2, len(self._used)), np.int16)
            np.cumsum(reached, axis=0, dtype=np.int16, out=counts[1:])
            reached = np.zeros_like(reached)
            for firsts, origins, step in zip(allowed, self._from, self._steps, strict=True):
                alive = origins[counts[-1, origins] > 0]
                if alive.size:
                    seen = counts[:, alive]
                    reached[:, alive + step] |= seen[self._order] > seen[firsts]
        return bool(reached[self._blocks].any())

    def quickest(self, stages: int, limit_s: float) -> tuple[float, tuple[StageChoice, ...]] | None:
        """Returns the way of `stages` stages with the least seconds in all, and these seconds, which come first.

        They include the hops and the tokens' way back. Each stage has at most `limit_s` seconds for a group. None when
        there is no such way.
        """
        if self._limit_s != limit_s:
            self._limit_s, self._layers = limit_s, {}
            self._firsts = [_first_allowed(table <= limit_s) for table in self._tables.seconds]
        ways = [way for start in self._tables.starts if (way := self._quickest_from(start, stages)) is not None]
        return min(ways, key=lambda way: way[0], default=None)

    def _quickest_from(self, start: int | None, stages: int) -> tuple[float, tuple[StageChoice, ...]] | None:
        """Returns the quickest of the ways that begin on this kind (None: any kind)."""
        layers = self._layers.setdefault(start, [])
        while len(layers) < stages:
            layers.append(self._next_layer(layers[-1] if layers else None, start))
        ends = layers[stages - 1][self._blocks]
        if stages > 1:
            ends = ends + self._tables.backs[:, start or 0, None]
        if not np.isfinite(ends).any():
            return None
        kind, used = (int(at) for at in np.unravel_index(np.argmin(ends), ends.shape))
        return float(ends[kind, used]), self._walk_back(layers[:stages], used, kind)

    def _next_layer(self, before_it: F64 | None, start: int | None) -> F64:
        """Least seconds until one more stage is through: [blocks covered, kind of the last stage, combination].

        `before_it` is the layer of one stage less (None: this is the first stage).
        """
        layer = np.full((self._blocks + 1, len(self.space.kinds), len(self._used)), np.inf)
        befores = [self._before(before_it, kind) for kind in range(len(self.space.kinds))]
        for at, option in enumerate(self.space.options):
            if before_it is None and start not in (None, option.kind):
                continue
            before, origins = befores[option.kind], self._from[at]
            alive = origins[np.isfinite(before[:, origins]).any(axis=0)]
            if not alive.size:
                continue
            sums, firsts = self._tables.sums[at], self._firsts[at]
            # A stage of blocks i+1 to j takes sums[j] - sums[i], so the best i has the least before[i] - sums[i].
            ways = _least_of_ranges(before[:, alive] - sums[:, None], firsts) + sums[:, None]
            target = alive + self._steps[at]
            layer[:, option.kind, target] = np.minimum(layer[:, option.kind, target], ways)
        return layer

    def _before(self, layer: F64 | None, kind: int) -> F64:
        """Least seconds until a stage of this kind may begin, hop included: [blocks covered, combination]."""
        if layer is None:
            start = np.full((self._blocks + 1, len(self._used)), np.inf)
            start[0, 0] = 0.0
            return start
        return (layer + self._tables.hops[:, :, kind, None]).min(axis=1)

    def _walk_back(self, layers: list[F64], used: int, kind: int) -> tuple[StageChoice, ...]:
        """Returns the stages that led to this end: each is the one whose seconds add up to the same sum."""
        stages: list[StageChoice] = []
        last = self._blocks
        for number in reversed(range(len(layers))):
            before_it = layers[number - 1] if number else None
            stage = self._step_back(before_it, used, kind, last, float(layers[number][last, kind, used]))
            stages.append(stage)
            used -= self._steps[self.space.options.index(stage.option)]
            last = stage.first
            if before_it is not None:
                kind = int(np.argmin(before_it[last, :, used] + self._tables.hops[last, :, stage.option.kind]))
        return tuple(reversed(stages))

    def _step_back(self, before_it: F64 | None, used: int, kind: int, last: int, target: float) -> StageChoice:
        """Returns the stage that ends at `last` and has `target` seconds as its sum in `_next_layer`."""
        for at, option in enumerate(self.space.options):
            origin, first = used - self._steps[at], int(self._firsts[at][last])
            if option.kind != kind or origin < 0 or origin not in self._from[at] or first >= last:
                continue
            sums = self._tables.sums[at]
            rest = self._before(before_it, kind)[first:last, origin] - sums[first:last]
            if float(rest.min() + sums[last]) == target:
                return StageChoice(option, first + int(np.argmin(rest)), last)
        raise AssertionError("no stage gives this sum")


def _least_of_ranges(values: F64, firsts: NDArray[np.int64]) -> F64:
    """Returns in row j the least of rows firsts[j] to j - 1 of `values`, in each column; inf for an empty range.

    It first takes the least of every 2, 4, 8... consecutive rows: any range is the union of two of these.
    """
    order = np.arange(len(values))
    widths = order - firsts
    least = np.full_like(values, np.inf)
    doubled, width = values, 1
    while True:
        rows = np.flatnonzero((width <= widths) & (widths < 2 * width))
        if rows.size:
            least[rows] = np.minimum(doubled[firsts[rows]], doubled[rows - width])
        if 2 * width > widths.max():
            return least
        doubled = np.minimum(doubled[:-width], doubled[width:])
        width *= 2


def _first_allowed(allowed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns for each j the least i with `allowed[i, j]`, or j where there is none.

    All i from there to j - 1 are allowed too, because fewer blocks take less time and memory.
    """
    order = np.arange(allowed.shape[1])
    return np.where(allowed.any(axis=0), allowed.argmax(axis=0), order)
