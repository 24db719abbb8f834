"""Strategy `uniform`: equal numbers of layers, with the embedding in the first part and the head in the last."""

from itertools import accumulate

from blockrelay.quantities import counted
from blockrelay_scheduler.planning.problem import Placement, Problem, placed_in_turn


def uniform(problem: Problem) -> Placement:
    """Returns the placement that divides the layers evenly; the first parts get one more where a remainder is left.

    With as many parts as blocks, the head is a part by itself. Raises UsageError for more parts than blocks, for more
    target devices than parts, and for an unknown target.
    """
    layers, parts = problem.blocks - 1, problem.parts
    if parts > layers:  # as many parts as blocks: the last one is the head alone
        sizes = [1] * problem.blocks
    else:
        size, larger = divmod(layers, parts)
        sizes = [size + (at < larger) for at in range(parts)]
        sizes[-1] += 1
    cut = "layers are divided evenly" if len(sizes) > 1 else "one part"
    bounds = [(last - size + 1, last) for size, last in zip(sizes, accumulate(sizes), strict=True)]
    reasons = [f"{counted(size, 'block')} of {problem.blocks}: {cut}" for size in sizes]
    return placed_in_turn(problem, bounds, reasons)
