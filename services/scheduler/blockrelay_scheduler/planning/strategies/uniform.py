"""`uniform`: equal numbers of layers. The embedding rides along with the first part, the head with the last."""

from blockrelay_scheduler.planning.problem import Placement, Problem, consecutive, counted


def uniform(problem: Problem) -> Placement:
    """The layers are divided; what remains goes to the first parts, one each."""
    layers, parts = problem.blocks - 1, problem.parts
    if parts > layers:  # the head alone is the last one
        sizes = [1] * problem.blocks
    else:
        size, larger = divmod(layers, parts)
        sizes = [size + (at < larger) for at in range(parts)]
        sizes[-1] += 1
    whole = f"of {problem.blocks} blocks, in {counted(len(sizes), 'part')} of as many layers each as can be"
    return consecutive(problem, sizes, [f"{size} {whole}" for size in sizes])
