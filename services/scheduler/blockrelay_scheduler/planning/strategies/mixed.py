"""Strategy `mixed`: the share of memory and the share of computing time count half each."""

from blockrelay.quantities import counted, format_quantity, format_seconds
from blockrelay_scheduler.planning.problem import Placement, Problem
from blockrelay_scheduler.planning.strategies.balanced import balanced


def mixed(problem: Problem) -> Placement:
    """Returns the placement whose largest load is as small as can be.

    The load of a part is the mean of two shares: its bytes in its device's memory, and its seconds on its device. Each
    is relative to the device on which the whole model has least, and so slow or small devices get fewer blocks. Devices
    count as equally large unless the memory of all is known. Raises UsageError for a number of parts or targets that
    the model cannot have, and for an unknown target.
    """
    devices = problem.target_devices(problem.parts)
    rows, context = problem.promise.requests, problem.promise.context / 2
    is_known = all(device.memory_bytes is not None for device in devices)
    capacities = [(device.memory_bytes or 1) if is_known else 1 for device in devices]
    memory = min(
        problem.bytes_of(1, problem.blocks, device) / size for device, size in zip(devices, capacities, strict=True)
    )
    computing = min(problem.costs.seconds(device, 1, problem.blocks, rows, context) for device in devices)

    def load(first: int, last: int, part: int) -> float:
        filled = problem.bytes_of(first, last, devices[part]) / capacities[part]
        return (filled / memory + problem.costs.seconds(devices[part], first, last, rows, context) / computing) / 2

    def reason(first: int, last: int, part: int) -> str:
        used = format_quantity(problem.bytes_of(first, last, devices[part]), "B")
        seconds = format_seconds(problem.costs.seconds(devices[part], first, last, rows, context))
        return f"{used} and {seconds} for a step of {counted(rows, 'row')}, which count half each"

    return balanced(problem, load, reason)
