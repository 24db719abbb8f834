"""Cuts blocks so that the fullest part is as empty as can be: what `memory`, `compute` and `mixed` share."""

from collections.abc import Callable
from functools import cache

from blockrelay_scheduler.planning.problem import Problem

#: Load of blocks [first, last] (1-based, inclusive) on part number `part`, 0-based; never less for more blocks.
Load = Callable[[int, int, int], float]


def balanced_sizes(problem: Problem, load: Load) -> list[int]:
    """Blocks of each part so that the highest load is lowest; of equal ones the first parts get as much as they can.

    Exact, by dynamic programming over where each part ends. No part is empty.
    """
    blocks, parts = problem.blocks, problem.parts

    @cache
    def best(part: int, first: int) -> tuple[float, int]:
        """The lowest highest load of parts `part` and later on blocks from `first` on, and where `part` ends."""
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
