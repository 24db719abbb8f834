"""The best stages for a number of stages, by dynamic programming over how many devices of each kind are used. Exact.

A state is (devices used of each kind, kind of the last stage, blocks covered). It is exact because devices of a kind
are interchangeable, and quick as long as there are few such states: `fits`.
"""

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from blockrelay_scheduler.planning.strategies.optimal.search_space import F64, Option, Space, Tables

#: Combinations of used devices up to which this search is quick.
MAX_COMBINATIONS = 1000


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks first+1 to last by an option."""

    option: Option
    first: int
    last: int


def fits(space: Space) -> bool:
    """Whether this search is the one to take."""
    return prod(len(devices) + 1 for devices in space.kinds) <= MAX_COMBINATIONS


class CountSearch:
    """Of one space, for one number of groups."""

    def __init__(self, space: Space, tables: Tables) -> None:
        self.space, self._tables = space, tables
        self._blocks = space.problem.blocks
        sizes = [len(devices) for devices in space.kinds]
        self._used = np.array(list(product(*(range(size + 1) for size in sizes))), np.int64)
        strides = np.array([prod(size + 1 for size in sizes[at + 1 :]) for at in range(len(sizes))], np.int64)
        self._steps = [option.replicas * int(strides[option.kind]) for option in space.options]
        limit = np.array(sizes)
        self._most: float | None = None  # of the layers that are known
        self._layers: dict[int | None, list[F64]] = {}  # by the kind that the way begins on
        self._firsts: list[NDArray[np.int64]] = []
        self._from: list[NDArray[np.int64]] = []  # by option: the combinations that have so many devices left
        for option in space.options:
            left = self._used[:, option.kind] + option.replicas <= limit[option.kind]
            self._from.append(np.flatnonzero(left))

    def is_possible(self, stages: int, most: float) -> bool:
        """Whether so many stages cover all blocks, none of them with more than `most` seconds for a group."""
        allowed = [(table <= most).astype(np.float32) for table in self._tables.seconds]
        reached = np.zeros((len(self._used), self._blocks + 1), np.float32)
        reached[0, 0] = 1
        for _ in range(stages):
            after = np.zeros_like(reached)
            for option, (origins, step) in enumerate(zip(self._from, self._steps, strict=True)):
                alive = origins[reached[origins].any(axis=1)]
                if alive.size:
                    after[alive + step] += reached[alive] @ allowed[option]
            reached = np.minimum(after, 1)
        return bool(reached[:, self._blocks].any())

    def quickest(self, stages: int, most: float) -> tuple[float, tuple[Stage, ...]] | None:
        """The way through so many stages with the least seconds in all, hops included, none of them with more than
        `most`; None when there is none."""
        if self._most != most:
            self._most, self._layers = most, {}
            self._firsts = [_first_allowed(table <= most) for table in self._tables.seconds]
        found = [way for start in self._tables.starts if (way := self._quickest_from(start, stages)) is not None]
        return min(found, key=lambda way: way[0], default=None)

    def _quickest_from(self, start: int | None, stages: int) -> tuple[float, tuple[Stage, ...]] | None:
        """The same, of the ways that begin on this kind (None: any)."""
        layers = self._layers.setdefault(start, [])
        while len(layers) < stages:
            layers.append(self._next_layer(layers[-1] if layers else None, start))
        ends = layers[stages - 1][:, :, self._blocks]
        if stages > 1:
            ends = ends + self._tables.backs[:, start or 0]
        if not np.isfinite(ends).any():
            return None
        used, kind = (int(at) for at in np.unravel_index(np.argmin(ends), ends.shape))
        return float(ends[used, kind]), self._walk_back(layers[:stages], used, kind)

    def _next_layer(self, before_it: F64 | None, start: int | None) -> F64:
        """Seconds until one more stage is through: [combination, kind of the last, blocks covered]."""
        layer = np.full((len(self._used), len(self.space.kinds), self._blocks + 1), np.inf)
        for at, option in enumerate(self.space.options):
            if before_it is None and start not in (None, option.kind):
                continue
            before = self._before(before_it, option.kind)
            origins = self._from[at]
            alive = origins[np.isfinite(before[origins]).any(axis=1)]
            if not alive.size:
                continue
            sums, firsts = self._tables.sums[at], self._firsts[at]
            # A stage of blocks i+1 to j takes sums[j] - sums[i]: the best i of a range is that with the least rest.
            rest = before[alive] - sums
            target = alive + self._steps[at]
            for last in range(1, self._blocks + 1):
                if firsts[last] < last:
                    ways = rest[:, firsts[last] : last].min(axis=1) + sums[last]
                    layer[target, option.kind, last] = np.minimum(layer[target, option.kind, last], ways)
        return layer

    def _before(self, layer: F64 | None, kind: int) -> F64:
        """Seconds until a stage of this kind may begin: [combination, blocks covered]."""
        if layer is None:
            start = np.full((len(self._used), self._blocks + 1), np.inf)
            start[0, 0] = 0.0
            return start
        return (layer + self._tables.hops[None, :, kind, None]).min(axis=1)

    def _walk_back(self, layers: list[F64], used: int, kind: int) -> tuple[Stage, ...]:
        """The stages that led to this end, by looking for who gives the same sum."""
        found: list[Stage] = []
        last = self._blocks
        for number in reversed(range(len(layers))):
            before_it = layers[number - 1] if number else None
            found.append(self._step_back(before_it, used, kind, last, float(layers[number][used, kind, last])))
            used -= self._steps[self.space.options.index(found[-1].option)]
            last = found[-1].first
            if before_it is not None:
                kind = int(np.argmin(before_it[used, :, last] + self._tables.hops[:, found[-1].option.kind]))
        return tuple(reversed(found))

    def _step_back(self, before_it: F64 | None, used: int, kind: int, last: int, target: float) -> Stage:
        for at, option in enumerate(self.space.options):
            origin, first = used - self._steps[at], int(self._firsts[at][last])
            if option.kind != kind or origin < 0 or origin not in self._from[at] or first >= last:
                continue
            sums = self._tables.sums[at]
            rest = self._before(before_it, kind)[origin, first:last] - sums[first:last]
            if float(rest.min() + sums[last]) == target:
                return Stage(option, first + int(np.argmin(rest)), last)
        raise AssertionError("a sum that nobody gives")


def _first_allowed(allowed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each j the least i with `allowed[i, j]`, or j; what is allowed is so for all i from there to j - 1."""
    order = np.arange(allowed.shape[1])
    return np.where(allowed.any(axis=0), allowed.argmax(axis=0), order)
