"""Strategy `memory`: each part fills about the same share of its device's memory, with weights and KV pages."""

from blockrelay.quantities import format_quantity
from blockrelay_scheduler.planning.problem import Placement, Problem
from blockrelay_scheduler.planning.strategies.balanced import balanced


def memory(problem: Problem) -> Placement:
    """Returns the placement whose largest part, as a share of its device's memory, is as small as can be.

    Parts count one by one, also where a device has several. Devices count as equally large unless the memory of all is
    known. Raises UsageError for a number of parts or targets that the model cannot have, and for an unknown target.
    """
    devices = problem.target_devices(problem.parts)
    is_known = all(device.memory_bytes is not None for device in devices)

    def load(first: int, last: int, part: int) -> float:
        return problem.bytes_of(first, last, devices[part]) / ((devices[part].memory_bytes or 1) if is_known else 1)

    def reason(first: int, last: int, part: int) -> str:
        device = devices[part]
        used = problem.bytes_of(first, last, device)
        share = f", {100 * used / device.memory_bytes:.0f} % of {device.id}" if device.memory_bytes else ""
        return f"{format_quantity(used, 'B')} of weights and KV pages{share}: no other cut leaves more room"

    return balanced(problem, load, reason)
