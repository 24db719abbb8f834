"""Whether a placement has room: weights and the promised KV pages of every part, on every device. Pure.

Who refuses it says what would fit: the longest context for which this placement has room.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from blockrelay.quantities import format_quantity
from blockrelay_scheduler.planning.problem import NoPlan, Part, Placement, Problem, Promise, counted


def check_memory(problem: Problem, placement: Placement) -> None:
    """NoPlan for a part above the limit that was wished for, or a device with more than its memory."""
    used: dict[str, int] = defaultdict(int)
    on: dict[str, list[Part]] = defaultdict(list)
    limit = problem.wishes.memory_limit
    for part in placement.parts:
        needed = problem.bytes_of(part.first, part.last, len(part.devices))
        if limit is not None and needed > limit:
            what = f"{_needs([part])} {_bytes(needed)}, {_bytes(needed - limit)} above the limit of a part"
            raise NoPlan(f"{what}; {_what_would_fit(problem, [part], limit)}")
        for device in part.devices:
            used[device] += needed
            on[device].append(part)
    for name, needed in used.items():
        memory = problem.fleet.device(name).memory_bytes
        if memory is not None and needed > memory:
            raise NoPlan(
                f"{_needs(on[name])} {_bytes(needed)} on {name}, which has {_bytes(memory)}: {_bytes(needed - memory)} "
                f"short; {_what_would_fit(problem, on[name], memory)}"
            )


def _needs(parts: Sequence[Part]) -> str:
    """`block_1 needs`, `block_1 to block_3 need`."""
    single = len(parts) == 1 and parts[0].first == parts[0].last
    return f"{' and '.join(part.blocks for part in parts)} {'needs' if single else 'need'}"


def _what_would_fit(problem: Problem, parts: Sequence[Part], room: int) -> str:
    promise = problem.promise
    weights = sum(problem.costs.weight_bytes(part.first, part.last) for part in parts)
    said = f"{_bytes(weights)} are weights, the rest KV pages for {counted(promise.requests, 'request')} of "
    said += f"{counted(promise.context, 'token')}"
    for requests in (promise.requests, 1):
        one = replace(problem, promise=Promise(context=1, requests=requests))
        per_token = sum(one.kv_bytes(part.first, part.last, len(part.devices)) for part in parts)
        if per_token and (context := (room - weights) // per_token) > 0:
            return f"{said}; {counted(requests, 'request')} of {counted(context, 'token')} would fit"
    return f"{said}; choose other boundaries or devices, or convert the model to a smaller precision"


def _bytes(count: int) -> str:
    return format_quantity(count, "B")
