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
from blockrelay_scheduler.policy import MAX_COMBINATIONS


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
        self._order = np.arange(self._blocks + 1)
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
        allowed = [_first_allowed(table <= most) for table in self._tables.seconds]
        reached = np.zeros((self._blocks + 1, len(self._used)), np.bool_)
        reached[0, 0] = True
        for _ in range(stages):
            # How many of the blocks before i are reached: a difference says whether any between two is.
            counts = np.zeros((self._blocks + 2, len(self._used)), np.int16)
            np.cumsum(reached, axis=0, dtype=np.int16, out=counts[1:])
            reached = np.zeros_like(reached)
            for firsts, origins, step in zip(allowed, self._from, self._steps, strict=True):
                alive = origins[counts[-1, origins] > 0]
                if alive.size:
                    seen = counts[:, alive]
                    reached[:, alive + step] |= seen[self._order] > seen[firsts]
        return bool(reached[self._blocks].any())

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
        ends = layers[stages - 1][self._blocks]
        if stages > 1:
            ends = ends + self._tables.backs[:, start or 0, None]
        if not np.isfinite(ends).any():
            return None
        kind, used = (int(at) for at in np.unravel_index(np.argmin(ends), ends.shape))
        return float(ends[kind, used]), self._walk_back(layers[:stages], used, kind)

    def _next_layer(self, before_it: F64 | None, start: int | None) -> F64:
        """Seconds until one more stage is through: [blocks covered, kind of the last, combination]."""
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
            # A stage of blocks i+1 to j takes sums[j] - sums[i]: the best i of a range is that with the least rest.
            ways = _least_of_ranges(before[:, alive] - sums[:, None], firsts) + sums[:, None]
            target = alive + self._steps[at]
            layer[:, option.kind, target] = np.minimum(layer[:, option.kind, target], ways)
        return layer

    def _before(self, layer: F64 | None, kind: int) -> F64:
        """Seconds until a stage of this kind may begin: [blocks covered, combination]."""
        if layer is None:
            start = np.full((self._blocks + 1, len(self._used)), np.inf)
            start[0, 0] = 0.0
            return start
        return (layer + self._tables.hops[:, :, kind, None]).min(axis=1)

    def _walk_back(self, layers: list[F64], used: int, kind: int) -> tuple[Stage, ...]:
        """The stages that led to this end, by looking for who gives the same sum."""
        found: list[Stage] = []
        last = self._blocks
        for number in reversed(range(len(layers))):
            before_it = layers[number - 1] if number else None
            found.append(self._step_back(before_it, used, kind, last, float(layers[number][last, kind, used])))
            used -= self._steps[self.space.options.index(found[-1].option)]
            last = found[-1].first
            if before_it is not None:
                kind = int(np.argmin(before_it[last, :, used] + self._tables.hops[last, :, found[-1].option.kind]))
        return tuple(reversed(found))

    def _step_back(self, before_it: F64 | None, used: int, kind: int, last: int, target: float) -> Stage:
        for at, option in enumerate(self.space.options):
            origin, first = used - self._steps[at], int(self._firsts[at][last])
            if option.kind != kind or origin < 0 or origin not in self._from[at] or first >= last:
                continue
            sums = self._tables.sums[at]
            rest = self._before(before_it, kind)[first:last, origin] - sums[first:last]
            if float(rest.min() + sums[last]) == target:
                return Stage(option, first + int(np.argmin(rest)), last)
        raise AssertionError("a sum that nobody gives")


def _least_of_ranges(values: F64, firsts: NDArray[np.int64]) -> F64:
    """Row j: the least of rows firsts[j] to j - 1 of `values`, in each column; inf where there is none.

    From the least of 2, 4, 8... rows on end: two of these overlap to any range.
    """
    order = np.arange(len(values))
    widths = order - firsts
    found = np.full_like(values, np.inf)
    doubled, width = values, 1
    while True:
        rows = np.flatnonzero((width <= widths) & (widths < 2 * width))
        if rows.size:
            found[rows] = np.minimum(doubled[firsts[rows]], doubled[rows - width])
        if 2 * width > widths.max():
            return found
        doubled = np.minimum(doubled[:-width], doubled[width:])
        width *= 2


def _first_allowed(allowed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each j the least i with `allowed[i, j]`, or j; what is allowed is so for all i from there to j - 1."""
    order = np.arange(allowed.shape[1])
    return np.where(allowed.any(axis=0), allowed.argmax(axis=0), order)
