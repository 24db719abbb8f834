"""Strategy `compute`: each part takes its device about the same time."""

from blockrelay.quantities import counted, format_seconds
from blockrelay_scheduler.planning.problem import Placement, Problem
from blockrelay_scheduler.planning.strategies.balanced import balanced


def compute(problem: Problem) -> Placement:
    """Returns the placement whose slowest part is as fast as can be, for a step of the promised requests.

    Raises UsageError for a number of parts or targets that the model cannot have, and for an unknown target.
    """
    devices = problem.target_devices(problem.parts)
    rows, context = problem.promise.requests, problem.promise.context / 2

    def load(first: int, last: int, part: int) -> float:
        return problem.costs.seconds(devices[part], first, last, rows, context)

    def reason(first: int, last: int, part: int) -> str:
        seconds = format_seconds(load(first, last, part))
        return f"{seconds} for a step of {counted(rows, 'row')}: the slowest part is as fast as can be"

    return balanced(problem, load, reason)
