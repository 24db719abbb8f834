"""Checks that the weights and the promised KV pages of a placement fit on its devices. Pure.

The refusal says what would fit: the longest context for which this placement has room.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from blockrelay.quantities import format_quantity
from blockrelay_scheduler.planning.problem import NoPlan, Part, Placement, Problem, Promise


def check_memory(problem: Problem, placement: Placement) -> None:
    """Raises NoPlan for a part above the wished memory limit, or for a device whose parts exceed its memory.

    A device of unknown memory has no limit of its own.
    """
    bounds = list(_bounds(problem, placement))
    for bound in bounds:
        needed = bound.bytes(problem)
        if needed > bound.room:
            text = f"{_needs(bound.parts)} {_bytes(needed)}{bound.where}: {_bytes(needed - bound.room)} {bound.how}"
            raise NoPlan(f"{text}; {_what_would_fit(problem, bound, bounds)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A limit on the bytes of some parts on one device; `where` and `how` are words of the refusal."""

    parts: tuple[Part, ...]
    on: str
    """The id of the device."""
    room: int
    """Most bytes of all `parts` together."""
    where: str
    how: str

    def bytes(self, problem: Problem) -> int:
        """Bytes that the parts need together."""
        device = problem.fleet.device(self.on)
        return sum(problem.bytes_of(part.first, part.last, device, len(part.devices)) for part in self.parts)


def _bounds(problem: Problem, placement: Placement) -> Iterator[_Bound]:
    """Yields the limits of a placement: the wished one for each part, and the memory of each device."""
    if (limit := problem.wishes.memory_limit) is not None:
        for part in placement.parts:
            yield _Bound(parts=(part,), on=part.devices[0], room=limit, where="", how="above the limit of a part")
    on: dict[str, list[Part]] = defaultdict(list)
    for part in placement.parts:
        for name in part.devices:
            on[name].append(part)
    for name, parts in on.items():
        if (memory := problem.fleet.device(name).memory_bytes) is not None:
            where = f" on {name}, which has {_bytes(memory)}"
            yield _Bound(parts=tuple(parts), on=name, room=memory, where=where, how="short")


def _needs(parts: Sequence[Part]) -> str:
    """Returns subject and verb: `block_1 needs`, `block_1 to block_3 need`."""
    single = len(parts) == 1 and parts[0].first == parts[0].last
    return f"{' and '.join(part.blocks for part in parts)} {'needs' if single else 'need'}"


def _what_would_fit(problem: Problem, short: _Bound, bounds: Sequence[_Bound]) -> str:
    """Says what the bytes are for, and what this placement would have room for, or what else to do."""
    promise = problem.promise
    device = problem.fleet.device(short.on)
    weights = sum(problem.costs.weight_bytes(part.first, part.last, device) for part in short.parts)
    text = f"{_bytes(weights)} are weights, the rest KV pages for {promise}"
    for requests in (promise.requests, 1):
        nothing, one = (replace(problem, promise=Promise(context=c, requests=requests)) for c in (0, 1))
        contexts = [promise.context]
        for bound in bounds:
            empty, with_a_token = bound.bytes(nothing), bound.bytes(one)
            if with_a_token > empty:
                contexts.append((bound.room - empty) // (with_a_token - empty))
            elif empty > bound.room:
                contexts.append(0)
        if min(contexts) > 0:
            return f"{text}; {Promise(context=min(contexts), requests=requests)} would fit"
    return f"{text}; choose other boundaries or devices, or convert the model to a smaller precision"


def _bytes(count: int) -> str:
    return format_quantity(count, "B")
