"""Strategy `auto`: the best split, devices and replicas, for one request (`latency`) or many (`throughput`).

The search is exact over all plans whose stages are consecutive blocks, each on one or more devices of one kind, where
every device has room for its weights and the promised KV pages. It minimises the step of `prediction`:

    max( groups * the slowest stage, all stages + all hops )

For each number of stages, which gives the number of groups, it bounds the slowest stage and looks for the quickest way
within the bound. A way is a sequence of stages that covers all blocks. The best bound is found by bisection, because a
looser bound never makes the way slower.
"""

import time
from functools import partial

import numpy as np

from blockrelay_scheduler.planning.problem import NoPlan, Part, Placement, Problem
from blockrelay_scheduler.planning.strategies.optimal import count_search
from blockrelay_scheduler.planning.strategies.optimal.count_search import CountSearch, StageChoice
from blockrelay_scheduler.planning.strategies.optimal.path_search import PathSearch
from blockrelay_scheduler.planning.strategies.optimal.reasons import explained
from blockrelay_scheduler.planning.strategies.optimal.search_space import Space, Tables
from blockrelay_scheduler.planning.strategies.optimal.shortage import what_is_short
from blockrelay_scheduler.policy import PROOF_LIMIT_S

Search = CountSearch | PathSearch
#: A bound on the slowest stage that excludes only stages that do not fit, whose seconds are infinite.
ANY = float(np.finfo(np.float64).max)


def auto(problem: Problem) -> Placement:
    """Returns the plan with the shortest step; of equal ones that with fewer stages.

    It chooses from all devices of the fleet: `registry.place` leaves only the wished targets there. Raises NoPlan when
    none fits, and OutOfTime when the best was not found within PROOF_LIMIT_S.
    """
    until = time.monotonic() + PROOF_LIMIT_S
    # Of CPU devices that share cores only one is used: the fastest, or if no plan fits then, the one with most room.
    fastest, roomiest = Space.of(problem), Space.of(problem, roomiest=True)
    for space in (fastest, roomiest):
        if (way := _best_way(space, until)) is not None:
            return explained(problem, _placement(space, way), space.requests)
    raise NoPlan(what_is_short(problem, roomiest, partial(is_feasible, until=until)))


def _best_way(space: Space, until: float) -> tuple[StageChoice, ...] | None:
    """Returns the stages of the plan with the shortest step; None when no plan fits."""
    best: tuple[float, tuple[StageChoice, ...]] | None = None
    tables, search = _searching(space, 1, until)
    # The best plan mostly has one stage or very many: with its step as a bound, other numbers are refused quickly.
    for stages in (1, *range(space.most_stages, 1, -1)):
        if space.groups(stages) != tables.groups:
            tables, search = _searching(space, stages, until)
        below = np.inf
        if best is not None:
            below = best[0] if stages > len(best[1]) else float(np.nextafter(best[0], np.inf))
        best = _best_of(search, tables, stages, below=below) or best
    return best[1] if best else None


def _searching(space: Space, stages: int, until: float) -> tuple[Tables, Search]:
    """Returns the costs and the search for plans of this number of stages."""
    tables = space.tables(space.groups(stages))
    return tables, CountSearch(space, tables) if count_search.fits(space) else PathSearch(space, tables, until)


def _best_of(
    search: Search, tables: Tables, stages: int, *, below: float
) -> tuple[float, tuple[StageChoice, ...]] | None:
    """Returns the plan of `stages` stages with the shortest step and its seconds, if that is shorter than `below`."""
    if tables.least_seconds(stages) >= below:
        return None
    if tables.groups == 1:  # the slowest stage alone is never slower than all stages together
        quickest = search.quickest(stages, ANY)
        return quickest if quickest is not None and quickest[0] < below else None
    bounds = np.unique(np.concatenate([table[tables.groups * table < below] for table in tables.seconds]))
    if not bounds.size or not search.is_possible(stages, float(bounds[-1])):
        return None
    impossible, high = -1, bounds.size - 1
    while high - impossible > 1:
        middle = (impossible + high) // 2
        impossible, high = (impossible, middle) if search.is_possible(stages, float(bounds[middle])) else (middle, high)
    # As the bound grows, the slowest stage only gets slower and the way only quicker: the best is where both meet.
    best: tuple[float, tuple[StageChoice, ...]] | None = None
    low, middle, high = high, high, bounds.size - 1
    while low <= high:
        bound = float(bounds[middle])
        quickest = search.quickest(stages, bound)
        assert quickest is not None
        total, way = quickest
        step = max(tables.groups * _slowest(tables, search, way), total)
        if step < (best[0] if best else below):
            best = (step, way)
        if total > tables.groups * bound:
            low = middle + 1
        else:
            high = middle - 1
        middle = (low + high) // 2
    return best


def _slowest(tables: Tables, search: Search, way: tuple[StageChoice, ...]) -> float:
    """Returns the seconds of the slowest stage, for one group."""
    return max(float(tables.seconds[search.space.options.index(s.option)][s.first, s.last]) for s in way)


def _placement(space: Space, way: tuple[StageChoice, ...]) -> Placement:
    """Returns the stages as parts, without reasons, each on the next devices of its kind."""
    left = [list(devices) for devices in space.kinds]
    parts: list[Part] = []
    for stage in way:
        pool = left[stage.option.kind]
        devices = tuple(pool.pop(0).id for _ in range(stage.option.replicas))
        parts.append(Part(first=stage.first + 1, last=stage.last, devices=devices, reason=""))
    return Placement(parts=tuple(parts))


def is_feasible(problem: Problem, *, until: float) -> bool:
    """Returns whether any plan fits. Raises OutOfTime when that is not known at `until` (monotonic seconds)."""
    space = Space.of(problem, roomiest=True)
    counts = range(1, space.most_stages + 1)
    return any(_searching(space, stages, until)[1].is_possible(stages, ANY) for stages in counts)
