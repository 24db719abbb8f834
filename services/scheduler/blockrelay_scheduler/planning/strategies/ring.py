"""`ring` and `ring-speed`: shares of the model in proportion to memory, or to measured speed, as rings of peers do."""

from collections.abc import Mapping

from blockrelay.errors import UsageError
from blockrelay.planning.devices import Device
from blockrelay_scheduler.planning.problem import Part, Placement, Problem

#: Digits that the fractions are rounded to.
DIGITS = 5


def ring(problem: Problem) -> Placement:
    """Shares are of all memory. UsageError for a device whose memory is not told."""
    shares: dict[str, float] = {}
    for device in problem.fleet.devices:
        if device.memory_bytes is None:
            raise UsageError(f"ring needs the memory of every device, and that of {device.id} is not told")
        shares[device.id] = device.memory_bytes
    return _ring(problem, shares, "memory")


def ring_speed(problem: Problem) -> Placement:
    """Shares are of all speed: of models that each device alone would do in a second, a row at a time."""
    context = problem.promise.context / 2

    def speed(device: Device) -> float:
        return 1 / problem.costs.seconds(device, 1, problem.blocks, 1, context)

    return _ring(problem, {device.id: speed(device) for device in problem.fleet.devices}, "speed")


def _ring(problem: Problem, weights: Mapping[str, float], of_all: str) -> Placement:
    """Devices by weight, largest first (equal ones by id, descending), own [start, end) of the model each.

    A device has blocks int(start * n) to int(end * n) - 1, counted from 0; the last one ends at the last block; who
    would have none is left out.
    """
    names = sorted(weights, key=lambda name: (weights[name], name), reverse=True)
    blocks, total = problem.blocks, sum(weights.values())
    parts: list[Part] = []
    start = 0.0
    for name in names:
        share = weights[name] / total
        end = round(start + share, DIGITS)
        first, last = int(start * blocks), int(end * blocks) - 1
        if name == names[-1]:
            last = blocks - 1
        if first <= last:
            reason = f"{name} has {100 * share:.1f} % of all {of_all}: [{start:g}, {end:g}) of the model"
            parts.append(Part(first=first + 1, last=last + 1, devices=(name,), reason=reason))
        start = end
    return Placement(parts=tuple(parts))
