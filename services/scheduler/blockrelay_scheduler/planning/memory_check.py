"""Whether a placement has room: weights and the promised KV pages of every part, on every device. Pure."""

from collections import defaultdict

from blockrelay.quantities import format_quantity
from blockrelay_scheduler.planning.problem import NoPlan, Part, Placement, Problem


def check_memory(problem: Problem, placement: Placement) -> None:
    """NoPlan for a part above the limit that was wished for, or a device with more than its memory."""
    used: dict[str, int] = defaultdict(int)
    on: dict[str, list[Part]] = defaultdict(list)
    limit = problem.wishes.memory_limit
    for part in placement.parts:
        needed = problem.bytes_of(part.first, part.last, len(part.devices))
        if limit is not None and needed > limit:
            raise NoPlan(f"{part.blocks} need {_bytes(needed)}, {_bytes(needed - limit)} above the limit of a part")
        for device in part.devices:
            used[device] += needed
            on[device].append(part)
    for name, needed in used.items():
        memory = problem.fleet.device(name).memory_bytes
        if memory is not None and needed > memory:
            blocks = " and ".join(part.blocks for part in on[name])
            weights = sum(problem.costs.weight_bytes(part.first, part.last) for part in on[name])
            raise NoPlan(
                f"{blocks} need {_bytes(needed)} on {name}, which has {_bytes(memory)}: {_bytes(needed - memory)} "
                f"short ({_bytes(weights)} are weights, the rest KV pages for {problem.promise.requests} requests of "
                f"{problem.promise.context} tokens)"
            )


def _bytes(count: int) -> str:
    return format_quantity(count, "B")
