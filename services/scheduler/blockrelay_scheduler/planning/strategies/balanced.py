"""Cuts blocks into parts so that the highest load of a part is lowest: used by `memory`, `compute` and `mixed`."""

from collections.abc import Callable
from functools import cache

from blockrelay_scheduler.planning.problem import Problem

#: The load of blocks [first, last] (1-based, inclusive) on part number `part` (0-based); more blocks never have less.
Load = Callable[[int, int, int], float]


def balanced_sizes(problem: Problem, load: Load) -> list[int]:
    """Returns the number of blocks of each part so that the highest load is lowest; no part is empty.

    Among equally good cuts the first parts get as many blocks as they can. Exact, by dynamic programming over where
    each part ends.
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

    sizes: list[int] = []
    first = 1
    for part in range(parts):
        end = best(part, first)[1]
        sizes.append(end - first + 1)
        first = end + 1
    return sizes
