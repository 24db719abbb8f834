"""`ring`: shares of the model in proportion to memory, as rings of peers divide it."""

from blockrelay.errors import UsageError
from blockrelay_scheduler.planning.problem import Part, Placement, Problem

#: Digits that the fractions are rounded to.
DIGITS = 5


def ring(problem: Problem) -> Placement:
    """Devices by memory, largest first (equal ones by id, descending), own [start, end) of the model each.

    A device has blocks int(start * n) to int(end * n) - 1, counted from 0; the last one ends at the last block; who
    would have none is left out. UsageError for a device whose memory is not told.
    """
    devices = sorted(problem.fleet.devices, key=lambda d: (d.memory_bytes or 0, d.id), reverse=True)
    for device in devices:
        if device.memory_bytes is None:
            raise UsageError(f"ring needs the memory of every device, and that of {device.id} is not told")
    blocks, total = problem.blocks, sum(device.memory_bytes or 0 for device in devices)
    parts: list[Part] = []
    start = 0.0
    for at, device in enumerate(devices):
        share = (device.memory_bytes or 0) / total
        end = round(start + share, DIGITS)
        first, last = int(start * blocks), int(end * blocks) - 1
        if at == len(devices) - 1:
            last = blocks - 1
        if first <= last:
            reason = f"{device.id} has {100 * share:.1f} % of all memory: [{start:g}, {end:g}) of the model"
            parts.append(Part(first=first + 1, last=last + 1, devices=(device.id,), reason=reason))
        start = end
    return Placement(parts=tuple(parts))
