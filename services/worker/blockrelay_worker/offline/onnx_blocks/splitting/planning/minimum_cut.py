"""Finds the minimum vertex cut of a graph, by maximum flow along shortest paths (Edmonds and Karp).

That is fast enough here: a graph of one layer has some hundred vertices, and few paths saturate it.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

#: A vertex split into the points before and behind its capacity; also the common source and sink of all flow.
_Point = tuple[str, Literal["in", "out", "start", "end"]]
_START: _Point = ("", "start")
_END: _Point = ("", "end")
_Residual = dict[_Point, dict[_Point, int]]


@dataclass(frozen=True, slots=True)
class Cut:
    """A vertex cut: every path from a source to a sink goes through one of `vertices`."""

    vertices: frozenset[str]
    before: frozenset[str]
    """The side of the sources, with `vertices`.

    If the cut is nearest to the sources, it is all that they reach without passing one of `vertices`. If it is nearest
    to the sinks, it is all from which no path leads to a sink without passing one.
    """


def minimum_cut(
    weights: Mapping[str, int],
    edges: Iterable[tuple[str, str]],
    *,
    sources: Collection[str],
    sinks: Collection[str],
    nearest_to: Literal["sources", "sinks"],
) -> Cut | None:
    """Returns the vertex cut with the smallest sum of weights, or None if a source is a sink.

    `weights` has every vertex, by name, with a weight of at least 1. `edges` are pairs: from, to. `nearest_to` chooses
    between equally light cuts. A source may be in the cut, a sink is not. The cut is empty if no path leads to a sink.
    """
    if not set(sources).isdisjoint(sinks):
        return None
    residual = _residual(weights, edges, sources, sinks)
    while (path := _path(residual)) is not None:
        room = min(residual[one][other] for one, other in pairwise(path))
        for one, other in pairwise(path):
            residual[one][other] -= room
            residual[other][one] += room
    if nearest_to == "sources":
        beyond = residual.keys() - _reached(residual, _START).keys()
    else:
        backwards = {point: {other: residual[other][point] for other in others} for point, others in residual.items()}
        beyond = _reached(backwards, _END).keys()
    before = frozenset(name for name in weights if (name, "in") not in beyond)
    return Cut(frozenset(name for name in before if (name, "out") in beyond), before)


def _residual(
    weights: Mapping[str, int], edges: Iterable[tuple[str, str]], sources: Collection[str], sinks: Collection[str]
) -> _Residual:
    endless = sum(weights.values()) + 1
    residual: _Residual = {_START: {}, _END: {}}
    for name in weights:
        residual[name, "in"], residual[name, "out"] = {}, {}

    def connect(one: _Point, other: _Point, room: int) -> None:
        residual[one][other] = room
        residual[other].setdefault(one, 0)

    for name, weight in weights.items():
        connect((name, "in"), (name, "out"), weight)
    for one, other in edges:
        connect((one, "out"), (other, "in"), endless)
    for name in sources:
        connect(_START, (name, "in"), endless)
    for name in sinks:
        connect((name, "in"), _END, endless)
    return residual


def _path(residual: _Residual) -> list[_Point] | None:
    """Returns the shortest path from the source to the sink that has capacity left; None if there is none."""
    came_from = _reached(residual, _START)
    if _END not in came_from:
        return None
    path = [_END]
    while path[-1] != _START:
        path.append(came_from[path[-1]])
    return path[::-1]


def _reached(residual: _Residual, start: _Point) -> dict[_Point, _Point]:
    """Returns the points that can be reached from `start` with capacity left, each with the point before it."""
    came_from = {start: start}
    waiting = deque([start])
    while waiting:
        point = waiting.popleft()
        for other, room in residual[point].items():
            if room > 0 and other not in came_from:
                came_from[other] = point
                waiting.append(other)
    return came_from
