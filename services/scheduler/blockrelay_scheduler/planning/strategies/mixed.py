"""`mixed`: memory and computing count half each."""

from blockrelay.quantities import counted, format_quantity, format_seconds
from blockrelay_scheduler.planning.problem import Placement, Problem, consecutive
from blockrelay_scheduler.planning.strategies.balanced import balanced_sizes


def mixed(problem: Problem) -> Placement:
    """The part with the largest mean of its share of all memory and its share of all computing is as small as can be.

    Shares are of what the part would have on its own device: slow or small devices get less.
    """
    devices = problem.target_devices(problem.parts)
    rows, context = problem.promise.requests, problem.promise.context / 2
    told = all(device.memory_bytes is not None for device in devices)
    sizes_of = [(device.memory_bytes or 1) if told else 1 for device in devices]
    memory = min(
        problem.bytes_of(1, problem.blocks, device) / size for device, size in zip(devices, sizes_of, strict=True)
    )
    computing = min(problem.costs.seconds(device, 1, problem.blocks, rows, context) for device in devices)

    def load(first: int, last: int, part: int) -> float:
        filled = problem.bytes_of(first, last, devices[part]) / sizes_of[part]
        return (filled / memory + problem.costs.seconds(devices[part], first, last, rows, context) / computing) / 2

    sizes = balanced_sizes(problem, load)
    reasons: list[str] = []
    first = 1
    for part, size in enumerate(sizes):
        used = format_quantity(problem.bytes_of(first, first + size - 1, devices[part]), "B")
        taken = format_seconds(problem.costs.seconds(devices[part], first, first + size - 1, rows, context))
        reasons.append(f"{used} and {taken} for a step of {counted(rows, 'row')}, which count half each")
        first += size
    return consecutive(problem, sizes, reasons)
