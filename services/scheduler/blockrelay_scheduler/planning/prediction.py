"""How fast a placement will be. Pure.

A step of R requests goes through all parts. Parts on resources of their own compute at the same time: the engine splits
the requests into as many groups as there are such resources, and a group comes back for its next token when it is
through. So a step takes as long as its busiest resource works on all groups, but no less than one group's way through
all parts, hops included:

    groups = min(resources, R)        rows = R / groups / replicas of the part
    step = max( max over resources: groups * sum of its parts' seconds(rows),
                sum over parts: seconds(rows) + hop(rows) ) + what a step takes beside

The CPU devices of one host are one resource: they share its cores.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from blockrelay.planning.devices import Device
from blockrelay.planning.profile import StepOverhead
from blockrelay_scheduler.planning.problem import Part, Placement, Problem

#: Requests at once for which plans are predicted.
SIZES = (1, 4, 16, 64)
#: Blocks and hops that nobody measured may take so many times as long as predicted, on a device whose speed is guessed
#: also a part of it only.
SLOWER, FASTER = 4.0, 8.0
#: What a step may take beside them where nobody measured it: Redis (on a fast disk, on a slow one), sampling, messages.
QUICK_STEP = StepOverhead(seconds=0.2e-3, seconds_per_row=10e-6)
SLOW_STEP = StepOverhead(seconds=15e-3, seconds_per_row=0.5e-3)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Of a step with `requests` at once, in `groups`: seconds; those of each part and of all hops for one group; and
    what the step takes beside them."""

    requests: int
    groups: int
    seconds: float
    part_seconds: tuple[float, ...]
    hop_seconds: float
    overhead_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.requests / self.seconds


def resource(device: Device) -> tuple[str, str]:
    """Devices with the same one take turns."""
    return ("cores of", device.host) if device.device_class == "CPU" else ("device", device.id)


def predict(problem: Problem, placement: Placement, requests: int, *, context: float | None = None) -> Predicted:
    """A step that gives `requests` >= 1 requests a token each, at the context (default: half of the promised one)."""
    context = problem.promise.context / 2 if context is None else context
    parts = placement.parts
    devices = [[problem.fleet.device(name) for name in part.devices] for part in parts]
    groups = min(requests, len({resource(device) for on in devices for device in on[:1]}))
    seconds: list[float] = []
    busy: dict[tuple[str, str], float] = defaultdict(float)
    for part, on in zip(parts, devices, strict=True):
        rows = max(1.0, requests / groups / len(on))
        each = [problem.costs.seconds(device, part.first, part.last, rows, context) for device in on]
        for device, one in zip(on, each, strict=True):
            busy[resource(device)] += groups * one
        seconds.append(max(each))
    hops = hop_seconds(problem, parts, requests / groups, context)
    overhead = problem.costs.step_seconds(requests)
    step = max(max(busy.values()), sum(seconds) + hops) + overhead
    return Predicted(requests, groups, step, tuple(seconds), hops, overhead)


def hop_seconds(problem: Problem, parts: tuple[Part, ...], rows: float, context: float) -> float:
    """All hops of `rows` rows, each attending to `context` tokens, on their way, and the tokens' way back to the first
    part."""
    if len(parts) == 1:
        return 0.0
    costs, fleet = problem.costs, problem.fleet
    first = [fleet.device(part.devices[0]) for part in parts]
    onwards = sum(
        costs.hop_seconds(fleet, a, b, rows * costs.hop_bytes(part.last, context))
        for part, (a, b) in zip(parts, pairwise(first), strict=False)
    )
    return onwards + costs.hop_seconds(fleet, first[-1], first[0], 0)


def spread(problem: Problem, placement: Placement, one: Predicted) -> tuple[float, float] | None:
    """The least and the most seconds of this step where not all of it was measured; None: it was."""
    costs = problem.costs
    profiled = all(costs.is_profiled(problem.fleet.device(name)) for part in placement.parts for name in part.devices)
    if profiled and costs.knows_steps:
        return None
    work = one.seconds - one.overhead_seconds
    quick, slow = (
        one.overhead_seconds if costs.knows_steps else step.seconds + one.requests * step.seconds_per_row
        for step in (QUICK_STEP, SLOW_STEP)
    )
    return work / (FASTER if problem.guessed else 1.0) + quick, work * (1.0 if profiled else SLOWER) + slow
