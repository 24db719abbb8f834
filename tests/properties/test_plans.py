"""`auto` against every plan there is: none of them is better, for either objective and by either search."""

from collections.abc import Iterator
from itertools import combinations, pairwise
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockrelay.planning.devices import Device, DeviceLink
from blockrelay.planning.profile import Hop
from blockrelay_scheduler.planning.memory_check import check_memory
from blockrelay_scheduler.planning.prediction import predict
from blockrelay_scheduler.planning.problem import NoPlan, Part, Placement, Problem
from blockrelay_scheduler.planning.strategies.optimal import count_search
from blockrelay_scheduler.planning.strategies.optimal.auto import auto
from tests.support.plan_problems import device, problem


def every_plan(problem: Problem) -> Iterator[Placement]:
    """Every cut into consecutive stages, each on one or more alike devices, none used twice."""
    blocks, devices = problem.blocks, problem.fleet.devices
    for stages in range(1, min(blocks, len(devices)) + 1):
        for cuts in combinations(range(1, blocks), stages - 1):
            bounds = [0, *cuts, blocks]
            spans = [(a + 1, b) for a, b in pairwise(bounds)]
            for chosen in _devices_for(problem, spans, devices):
                yield Placement(
                    parts=tuple(
                        Part(first=first, last=last, devices=tuple(d.id for d in on), reason="")
                        for (first, last), on in zip(spans, chosen, strict=True)
                    )
                )


def _devices_for(
    problem: Problem, spans: list[tuple[int, int]], left: tuple[Device, ...]
) -> Iterator[list[tuple[Device, ...]]]:
    if not spans:
        yield []
        return
    most = 1 if problem.objective == "latency" else min(len(left), problem.promise.requests)
    for count in range(1, most + 1):
        for on in combinations(left, count):
            if len({(d.device_class, d.memory_bytes) for d in on}) > 1:
                continue
            if not all(_may_change_places(problem, a.host, b.host) for a, b in combinations(on, 2)):
                continue
            rest = tuple(d for d in left if d not in on)
            for others in _devices_for(problem, spans[1:], rest):
                yield [on, *others]


def _may_change_places(problem: Problem, a: str, b: str) -> bool:
    """No link would be another if these hosts, of a device each, had each other's names."""
    names = {a: b, b: a}

    def links(names: dict[str, str]) -> set[tuple[frozenset[str], float]]:
        told = ((link.between, link.seconds) for link in problem.fleet.links if link.seconds)
        return {(frozenset(names.get(host, host) for host in between), seconds) for between, seconds in told}

    return links(names) == links({})


def seconds_of(problem: Problem, placement: Placement) -> float:
    """What auto makes small."""
    requests = 1 if problem.objective == "latency" else problem.promise.requests
    return predict(problem, placement, requests).seconds


def best_by_brute_force(problem: Problem) -> float | None:
    found: list[float] = []
    for placement in every_plan(problem):
        try:
            check_memory(problem, placement)
        except NoPlan:
            continue
        found.append(seconds_of(problem, placement))
    return min(found, default=None)


times = st.floats(0.01, 10.0)


@st.composite
def problems(draw: st.DrawFn, *, links: bool = False) -> Problem:
    """Up to five blocks and four devices of two classes, some alike; times without any pattern."""
    blocks = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 9), min_size=blocks, max_size=blocks))
    classes = draw(st.lists(st.sampled_from(["GPU", "NPU"]), min_size=1, max_size=4))
    memories = [draw(st.sampled_from([None, 8, 15])) for _ in classes]
    devices = [
        device(f"d{at}", name, memory=memory, host=f"h{at}")
        for at, (name, memory) in enumerate(zip(classes, memories, strict=True))
    ]
    seconds = {
        name: [{1: draw(times), 4: draw(times), 8: draw(times)} for _ in range(blocks)] for name in ("GPU", "NPU")
    }
    hop = Hop(seconds=draw(st.sampled_from([0.0, 0.1, 3.0])), seconds_per_byte=draw(st.sampled_from([0.0, 0.01])))
    hops = [(draw(st.sampled_from([0, 100, 900])), draw(st.sampled_from([0, 50]))) for _ in range(blocks)]
    between = [
        DeviceLink(between=(a.host, b.host), seconds=draw(st.sampled_from([0.0, 0.2, 4.0])), seconds_per_byte=0.0)
        for a, b in combinations(devices, 2)
        if links and draw(st.booleans())
    ]
    return problem(
        devices, seconds, sizes=sizes, kv=draw(st.sampled_from([0, 2])), context=draw(st.sampled_from([1, 2])),
        requests=draw(st.integers(1, 8)), objective=draw(st.sampled_from(["latency", "throughput"])), hop=hop,
        hops=hops, links=between,
    )  # fmt: skip


def check(given_problem: Problem) -> None:
    best = best_by_brute_force(given_problem)
    if best is None:
        with pytest.raises(NoPlan):
            auto(given_problem)
        return
    found = auto(given_problem)
    check_memory(given_problem, found)
    assert seconds_of(given_problem, found) == pytest.approx(best, rel=1e-9)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_counting_devices_by_kind_finds_the_best_plan(given_problem: Problem) -> None:
    check(given_problem)


@pytest.mark.thorough
@given(problems())
@settings(max_examples=1000, deadline=None)
def test_counting_devices_by_kind_finds_the_best_plan_of_more(given_problem: Problem) -> None:
    check(given_problem)


@given(problems(links=True))
@settings(max_examples=60, deadline=None)
def test_links_between_hosts_are_part_of_the_best_plan(given_problem: Problem) -> None:
    check(given_problem)


@given(problems(links=True))
@settings(max_examples=60, deadline=None)
def test_the_integer_program_finds_the_best_plan_too(given_problem: Problem) -> None:
    with patch.object(count_search, "MAX_COMBINATIONS", 0):
        check(given_problem)
