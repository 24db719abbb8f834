"""Strategy `custom`: the boundaries that the user gives, checked."""

from blockrelay.errors import UsageError
from blockrelay_scheduler.planning.problem import Placement, Problem, placed_in_turn


def custom(problem: Problem) -> Placement:
    """Returns the placement with the boundaries in `problem.wishes`, on the target devices in turn.

    Raises UsageError where none were given, and for boundaries that overlap, leave a block out or lie outside the
    model. Raises it also for more targets than parts, and for an unknown target.
    """
    wishes = problem.wishes
    if not wishes.boundaries:
        raise UsageError("custom needs boundaries: the blocks of each part, such as 1-3,4-9")
    expected = 1
    for first, last in wishes.boundaries:
        if first < expected:
            raise UsageError(f"boundaries: block_{first} is in two parts")
        if first > expected:
            raise UsageError(f"boundaries: block_{expected} is in no part")
        if last < first or last > problem.blocks:
            raise UsageError(f"boundaries: there is no part {first}-{last} in a model of {problem.blocks} blocks")
        expected = last + 1
    if expected <= problem.blocks:
        raise UsageError(f"boundaries: block_{expected} is in no part")
    reasons = ["these boundaries were asked for"] * len(wishes.boundaries)
    return placed_in_turn(problem, wishes.boundaries, reasons)
