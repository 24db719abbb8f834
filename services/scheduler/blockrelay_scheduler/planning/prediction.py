"""Predicts how fast a placement will be. Pure.

A step of R requests goes through all parts. Parts on different resources compute at the same time. The engine splits
the requests into as many groups as there are resources, and a group that is through all parts begins its next token. A
step takes as long as its busiest resource works on all groups, but no less than one group's way through all parts,
hops included:

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

#: Numbers of requests at once for which plans are predicted.
SIZES = (1, 4, 16, 64)
#: Blocks and hops without measurement may take up to SLOWER times the predicted seconds. On a device whose speed is
#: assumed they may also take as little as 1 / FASTER of them.
SLOWER, FASTER = 4.0, 8.0
#: The least and the most that sampling, messages and Redis (on a fast disk, on a slow one) add to a step, where this
#: was not measured.
QUICK_STEP = StepOverhead(seconds=0.2e-3, seconds_per_row=10e-6)
SLOW_STEP = StepOverhead(seconds=15e-3, seconds_per_row=0.5e-3)


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predicted seconds of a step that gives each of `requests` requests a token."""

    requests: int
    groups: int
    """Groups of requests that are in flight at once."""
    seconds: float
    """The whole step."""
    part_seconds: tuple[float, ...]
    """Each part, for one group."""
    hop_seconds: float
    """All hops together, for one group."""
    overhead_seconds: float
    """Sampling, messages and Redis, for all requests."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all requests together."""
        return self.requests / self.seconds


def resource(device: Device) -> tuple[str, str]:
    """Returns a key for what the device computes with; devices with equal keys take turns."""
    return ("cores of", device.host) if device.device_class == "CPU" else ("device", device.id)


def predict(problem: Problem, placement: Placement, requests: int, *, context: float | None = None) -> Predicted:
    """Predicts a step that gives each of `requests` >= 1 requests a token.

    Every request attends to `context` tokens (default: half of the promised context).
    """
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
    """Seconds of all hops of one group: `rows` tokens from part to part, and the results back to the first part.

    Each token attends to `context` tokens, which decides the bytes of hops between some ONNX blocks.
    """
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
    """Returns the least and the most seconds that the step `one`, of `predict`, may take, or None.

    None: the profile has the class of every device of the placement, and the overhead of a step. That does not say that
    hops were measured, nor that the profile is of the planned precision (`CostModel.is_estimated`).
    """
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
