"""Writes the message where no plan fits: what is short, on which device, by how much, and what would fit. Pure."""

from collections.abc import Callable
from dataclasses import replace

from blockrelay.quantities import counted, format_quantity
from blockrelay_scheduler.planning.problem import OutOfTime, Problem, Promise
from blockrelay_scheduler.planning.strategies.optimal.search_space import Space

#: A function that returns whether any plan of a problem fits. It may raise OutOfTime.
Fits = Callable[[Problem], bool]


def what_is_short(problem: Problem, space: Space, fits: Fits) -> str:
    """Returns the message for a problem that has no plan on the devices of `space`.

    `fits` is asked for smaller promises; if it raises OutOfTime, the message does not say what would fit.
    """
    promise, limit = problem.promise, problem.wishes.memory_limit
    rooms = {device.id: problem.room_of(device) or 0 for devices in space.kinds for device in devices}
    largest = max(rooms, key=lambda name: rooms[name])
    device = problem.fleet.device(largest)
    largest_block = max(range(1, problem.blocks + 1), key=lambda block: problem.bytes_of(block, block, device))
    pages = f"with KV pages for {promise}"
    whole, room, one = (
        problem.bytes_of(1, problem.blocks, device),
        sum(rooms.values()),
        problem.bytes_of(largest_block, largest_block, device),
    )
    if whole > room:
        has = f"the only device, {largest}, has" if len(rooms) == 1 else f"all {len(rooms)} devices together have"
        short = f"the model needs {_bytes(whole)} {pages}, and {has} room for {_bytes(room)}: "
        short += f"{_bytes(whole - room)} short"
    elif one > rooms[largest]:
        short = f"block_{largest_block} alone needs {_bytes(one)} {pages}, and the largest device, {largest}, has "
        short += f"room for {_bytes(rooms[largest])}: {_bytes(one - rooms[largest])} short"
    else:
        short = f"the model needs {_bytes(whole)} {pages}, and {counted(len(rooms), 'device')} have room "
        short += f"for {_bytes(room)}, but no split of it fits"
    within = f" with {_bytes(limit)} at most for a device's one part" if limit is not None else ""
    try:
        would_fit = f"; {_what_would_fit(problem, fits)}"
    except OutOfTime:
        would_fit = ""
    return f"no plan of auto fits{within}: {short}{would_fit}"


def _what_would_fit(problem: Problem, fits: Fits) -> str:
    """Says which smaller promise would fit: a shorter context, fewer requests, or one request of a shorter context."""
    promise = problem.promise
    context = _largest(promise.context, lambda n: fits(_promising(problem, context=n)))
    requests = _largest(promise.requests, lambda n: fits(_promising(problem, requests=n)))
    if context or requests:
        loads = [replace(promise, context=context)] if context else []
        loads += [replace(promise, requests=requests)] if requests else []
        return f"{', or '.join(map(str, loads))} would fit"
    alone = _largest(promise.context, lambda n: fits(_promising(problem, requests=1, context=n)))
    if alone:
        return f"{Promise(requests=1, context=alone)} would fit"
    if fits(_promising(problem, context=0)):
        return f"there is room for the weights, and for no KV pages beside them: {_more_room(problem)}"
    return f"the weights alone do not fit: {_more_room(problem)}, or convert the model to a smaller precision"


def _more_room(problem: Problem) -> str:
    return "add a device" if problem.wishes.memory_limit is None else "raise the limit, or add a device"


def _largest(limit: int, is_possible: Callable[[int], bool]) -> int:
    """Returns the largest number below `limit` that is possible, to three digits; 0 where none is."""
    low, high = 0, limit
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if is_possible(middle) else (low, middle)
    return low


def _promising(problem: Problem, *, context: int | None = None, requests: int | None = None) -> Problem:
    """Returns the problem with another promise: another context, or another number of requests."""
    now = problem.promise
    promise = Promise(context=now.context if context is None else context, requests=requests or now.requests)
    return replace(problem, promise=promise)


def _bytes(count: int) -> str:
    return format_quantity(count, "B")
