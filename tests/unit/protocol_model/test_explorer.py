"""The search itself, on models small enough to see through."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from tests.protocol_model.explorer import Step, TooLarge, explore


@dataclass
class Graph:
    """`steps` of numbers; a negative target is a fault. Begins at 1, ends at 9, breaks at 13."""

    edges: dict[int, list[int]]
    same: dict[int, int] = field(default_factory=dict[int, int])

    def initial(self) -> int:
        return 1

    def steps(self, state: int) -> Iterable[Step[int]]:
        return [(f"{state}>{abs(to)}", abs(to), to < 0) for to in self.edges.get(state, [])]

    def canonical(self, state: int) -> int:
        return self.same.get(state, state)

    def broken(self, state: int) -> str | None:
        return "unlucky" if state == 13 else None

    def done(self, state: int) -> bool:
        return state == 9


def test_a_sound_model_is_visited_once_per_state() -> None:
    found = explore(Graph({1: [2, 3], 2: [4], 3: [4], 4: [9, 1]}))
    assert (found.states, found.transitions, found.counterexample) == (5, 6, None)


def test_a_broken_invariant_comes_with_the_shortest_way_to_it() -> None:
    found = explore(Graph({1: [2, 3], 2: [4], 4: [5], 5: [13], 3: [13], 13: [9]}))
    assert found.counterexample is not None
    assert (found.counterexample.kind, found.counterexample.trace) == ("broken", ("1>3", "3>13"))


def test_a_state_without_a_faultless_way_to_the_end_hangs() -> None:
    found = explore(Graph({1: [2, 9], 2: [-9, 2]}))
    assert found.counterexample is not None
    assert (found.counterexample.kind, found.counterexample.trace) == ("hangs", ("1>2",))


def test_a_circle_that_can_be_left_does_not_hang() -> None:
    assert explore(Graph({1: [2], 2: [1, 9]})).counterexample is None


def test_what_a_fault_leads_to_must_recover() -> None:
    assert explore(Graph({1: [9, -2], 2: [9]})).counterexample is None
    assert explore(Graph({1: [9, -2]})).counterexample is not None


def test_states_that_differ_in_names_only_are_one() -> None:
    assert explore(Graph({1: [2, 3], 2: [9]}, same={3: 2})).states == 3


def test_a_model_that_is_too_large_is_no_success() -> None:
    with pytest.raises(TooLarge):
        explore(Graph({number: [number + 1] for number in range(1, 9)}), most_states=5)
