"""Strategies `ring` and `ring-speed`: each device gets a share of the model in proportion to its memory or speed.

Peer-to-peer systems that connect their devices in a ring, such as exo, divide a model in the same way.
"""

from collections.abc import Mapping

from blockrelay.errors import UsageError
from blockrelay.planning.devices import Device
from blockrelay_scheduler.planning.problem import Part, Placement, Problem

#: Digits that the fractions are rounded to.
DIGITS = 5


def ring(problem: Problem) -> Placement:
    """Returns the placement in which each device's share of the blocks is its share of all memory.

    A device whose share is less than a block may get none. Raises UsageError for a device of unknown memory.
    """
    shares: dict[str, float] = {}
    for device in problem.fleet.devices:
        if device.memory_bytes is None:
            raise UsageError(f"ring needs the memory of every device: give {device.id} memory_bytes")
        shares[device.id] = device.memory_bytes
    return _ring(problem, shares, "memory")


def ring_speed(problem: Problem) -> Placement:
    """Returns the placement in which each device's share of the blocks is its share of all speed.

    A device's speed is the tokens per second that it alone would give with the whole model, one request at a time. A
    device whose share is less than a block may get none.
    """
    context = problem.promise.context / 2

    def speed(device: Device) -> float:
        return 1 / problem.costs.seconds(device, 1, problem.blocks, 1, context)

    return _ring(problem, {device.id: speed(device) for device in problem.fleet.devices}, "speed")


def _ring(problem: Problem, weights: Mapping[str, float], of_all: str) -> Placement:
    """Returns the placement by weight: the largest device first, and equal ones by id in descending order.

    Each device owns a fraction [start, end) of the model, and has blocks int(start * n) to int(end * n) - 1, counted
    from 0. The last device ends at the last block. A device that would have no block is left out.
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
