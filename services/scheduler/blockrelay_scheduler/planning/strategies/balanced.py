"""Cuts blocks into parts so that the highest load of a part is lowest: used by `memory`, `compute` and `mixed`."""

from collections.abc import Callable
from functools import cache

from blockrelay_scheduler.planning.problem import Placement, Problem, placed_in_turn

#: The load of blocks [first, last] (1-based, inclusive) on part number `part` (0-based); more blocks never have less.
Load = Callable[[int, int, int], float]


def balanced(problem: Problem, load: Load, reason: Callable[[int, int, int], str]) -> Placement:
    """Returns the placement whose highest load is lowest; no part is empty.

    `reason` says why a part has its blocks, by the arguments of `load`. Among equally good cuts the first parts get as
    many blocks as they can. Exact, by dynamic programming over where each part ends. Raises UsageError for a number of
    parts or targets that the model cannot have, and for an unknown target.
    """
    blocks, parts = problem.blocks, problem.parts

    @cache
    def best(part: int, first: int) -> tuple[float, int]:
        """Returns the highest load of the best cut of blocks `first` and later into parts `part` and later, and the
        last block of `part` in that cut."""
        if part == parts - 1:
            return load(first, blocks, part), blocks
        last_possible = blocks - (parts - 1 - part)
        ends = range(last_possible, first - 1, -1)
        return min(((max(load(first, end, part), best(part + 1, end + 1)[0]), end) for end in ends), key=lambda p: p[0])

    bounds: list[tuple[int, int]] = []
    first = 1
    for part in range(parts):
        last = best(part, first)[1]
        bounds.append((first, last))
        first = last + 1
    reasons = [reason(first, last, part) for part, (first, last) in enumerate(bounds)]
    return placed_in_turn(problem, bounds, reasons)
