"""Exhaustive search over the states of a model. Knows nothing of what it explores."""

import time
from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)

#: Name, successor, and whether it is a fault: what may go wrong, but need not.
Step = tuple[str, S, bool]


class Model(Protocol[S]):
    """Finite. States are immutable and compare by value."""

    def initial(self) -> S: ...

    def steps(self, state: S) -> Iterable[Step[S]]:
        """Everything that may happen next."""
        ...

    def canonical(self, state: S) -> S:
        """One state for all that differ in names only. Steps, `broken` and `done` must not tell them apart."""
        ...

    def broken(self, state: S) -> str | None:
        """The invariant that does not hold, or None."""
        ...

    def done(self, state: S) -> bool:
        """Whether everything that was promised has happened."""
        ...


@dataclass(frozen=True, slots=True)
class Counterexample(Generic[S]):
    """The shortest way to a state that breaks an invariant, or from which no faultless steps lead to `done`."""

    kind: Literal["broken", "hangs"]
    what: str
    trace: tuple[str, ...]
    state: S

    def __str__(self) -> str:
        steps = "\n".join(f"  {number:3} {name}" for number, name in enumerate(self.trace, 1))
        return f"{self.what}\n{steps}\n  then: {self.state}"


@dataclass(frozen=True, slots=True)
class Found(Generic[S]):
    states: int
    transitions: int
    seconds: float
    counterexample: Counterexample[S] | None


class TooLarge(Exception):
    """More states than allowed: the bounds of the model are too wide."""


def explore(model: Model[S], *, most_states: int = 3_000_000) -> Found[S]:
    """Visit every reachable state. Stops at the first broken invariant; looks for states that hang at the end.

    Raises TooLarge.
    """
    started = time.monotonic()
    first = model.canonical(model.initial())
    number: dict[S, int] = {first: 0}
    states = [first]
    parents = array("l", [-1])
    names: list[str] = [""]
    sources, targets = array("l"), array("l")  # steps that are no faults
    done = array("l")
    transitions = 0

    def trace(index: int) -> tuple[str, ...]:
        way: list[str] = []
        while index > 0:
            way.append(names[index])
            index = parents[index]
        return tuple(reversed(way))

    def found(counterexample: Counterexample[S] | None) -> Found[S]:
        return Found(len(states), transitions, time.monotonic() - started, counterexample)

    if what := model.broken(first):
        return found(Counterexample("broken", what, (), first))
    at = 0
    while at < len(states):
        state = states[at]
        if model.done(state):
            done.append(at)
        for name, successor, fault in model.steps(state):
            transitions += 1
            successor = model.canonical(successor)
            index = number.get(successor)
            if index is None:
                index = len(states)
                if index >= most_states:
                    raise TooLarge(f"more than {most_states} states")
                number[successor] = index
                states.append(successor)
                parents.append(at)
                names.append(name)
                if what := model.broken(successor):
                    return found(Counterexample("broken", what, trace(index), successor))
            if not fault and index != at:
                sources.append(at)
                targets.append(index)
        at += 1
    stuck = _first_without_a_way(len(states), sources, targets, done)
    if stuck is None:
        return found(None)
    what = "no steps lead from here to the end, though nothing goes wrong any more"
    return found(Counterexample("hangs", what, trace(stuck), states[stuck]))


def _first_without_a_way(states: int, sources: "array[int]", targets: "array[int]", done: "array[int]") -> int | None:
    """The first state from which no state in `done` can be reached (AG EF done does not hold there)."""
    starts = array("l", [0]) * (states + 1)  # edges by target: a counting sort
    for target in targets:
        starts[target + 1] += 1
    for index in range(states):
        starts[index + 1] += starts[index]
    free, before = array("l", starts), array("l", [0]) * len(sources)
    for source, target in zip(sources, targets, strict=True):
        before[free[target]] = source
        free[target] += 1
    good = bytearray(states)
    waiting = list(done)
    for index in waiting:
        good[index] = 1
    while waiting:
        index = waiting.pop()
        for edge in range(starts[index], starts[index + 1]):
            if not good[before[edge]]:
                good[before[edge]] = 1
                waiting.append(before[edge])
    stuck = good.find(0)
    return None if stuck < 0 else stuck
