"""Explains why a stage of the best plan ends where it does: what one block more would need or cost. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from blockrelay.quantities import counted, format_quantity, format_seconds
from blockrelay_scheduler.planning.prediction import predict
from blockrelay_scheduler.planning.problem import Part, Placement, Problem


def explained(problem: Problem, placement: Placement, requests: int) -> Placement:
    """Returns `placement` with a reason for each part, in place of the ones that it has.

    `placement` must have the shortest step of all plans for `requests` requests at once: reasons say so unchecked. The
    devices of a part must be alike.
    """
    parts = placement.parts
    return replace(
        placement,
        parts=tuple(
            replace(part, reason=f"{_filled(problem, part)}; {_why(problem, parts, at, requests)}")
            for at, part in enumerate(parts)
        ),
    )


def _filled(problem: Problem, part: Part) -> str:
    """Returns the bytes that the part needs on each device, and the room there: `3 GB of 8 GB`."""
    needed, room = _needed(problem, part), _room(problem, part)
    return format_quantity(needed, "B") + (f" of {format_quantity(room, 'B')}" if room is not None else "")


def _why(problem: Problem, parts: Sequence[Part], at: int, requests: int) -> str:
    """Says why part `at` ends where it does: there is no room for another block, or the step would not be shorter."""
    seconds = _seconds(problem, parts, requests)
    step = f"a step of {counted(requests, 'request')}"
    best = f"{step} takes {format_seconds(seconds)}, and no plan has a shorter one"
    part = parts[at]
    if len(parts) == 1:
        return best
    if at == len(parts) - 1:
        before = parts[at - 1]
        no_room = _no_room(problem, part, before.last) or _no_room(problem, before, part.first)
        return no_room or best
    behind = parts[at + 1]
    if no_room := _no_room(problem, part, behind.first) or _no_room(problem, behind, part.last):
        return no_room
    moved = _seconds(problem, _with_one_more(parts, at), requests)
    with_one_more = f"with block_{behind.first} too {step} takes"
    if moved <= seconds * 1.001:
        return f"{with_one_more} as long"
    return f"{with_one_more} {format_seconds(moved)}, now {format_seconds(seconds)}"


def _no_room(problem: Problem, part: Part, block: int) -> str:
    """Says how many bytes a part lacks for `block`, which is next to it; empty where it lacks none."""
    room = _room(problem, part)
    more = _needed(problem, replace(part, first=min(part.first, block), last=max(part.last, block)))
    if room is None or more <= room:
        return ""
    return f"{' and '.join(part.devices)} is {format_quantity(more - room, 'B')} short of room for block_{block}"


def _with_one_more(parts: Sequence[Part], at: int) -> tuple[Part, ...]:
    """Returns the parts with the first block of the next one moved to part `at`; an empty part is left out."""
    part, behind = parts[at], parts[at + 1]
    left = (replace(behind, first=behind.first + 1),) if behind.first < behind.last else ()
    return (*parts[:at], replace(part, last=part.last + 1), *left, *parts[at + 2 :])


def _seconds(problem: Problem, parts: Sequence[Part], requests: int) -> float:
    return predict(problem, Placement(parts=tuple(parts)), requests).seconds


def _needed(problem: Problem, part: Part) -> int:
    return problem.bytes_of(part.first, part.last, problem.fleet.device(part.devices[0]), len(part.devices))


def _room(problem: Problem, part: Part) -> int | None:
    """Returns the bytes that the part may need on each of its devices, which are alike; None: no limit is known."""
    return problem.room_of(problem.fleet.device(part.devices[0]))
