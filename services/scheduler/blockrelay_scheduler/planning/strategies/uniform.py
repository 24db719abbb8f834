"""`uniform`: equal numbers of layers. The embedding rides along with the first part, the head with the last."""

from blockrelay.quantities import counted
from blockrelay_scheduler.planning.problem import Placement, Problem, consecutive


def uniform(problem: Problem) -> Placement:
    """The layers are divided; what remains goes to the first parts, one each."""
    layers, parts = problem.blocks - 1, problem.parts
    if parts > layers:  # the head alone is the last one
        sizes = [1] * problem.blocks
    else:
        size, larger = divmod(layers, parts)
        sizes = [size + (at < larger) for at in range(parts)]
        sizes[-1] += 1
    cut = "layers are divided evenly" if len(sizes) > 1 else "one part"
    return consecutive(problem, sizes, [f"{counted(size, 'block')} of {problem.blocks}: {cut}" for size in sizes])
