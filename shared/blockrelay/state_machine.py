"""States as data: a table of legal transitions, and the one function that makes them.

Each change is counted (`observability.states` shows the counts and the present state) and logged as STATE_CHANGED; what
changes many times a second is logged at level DEBUG. An event that the present state does not allow is a bug of ours
and raises IllegalTransition.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from blockrelay.errors import IllegalTransition
from blockrelay.observability.logs import get

State = TypeVar("State", bound=str)
Event = TypeVar("Event", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTable(Generic[State, Event]):
    """What is legal. `frequent` are the events that happen many times a second."""

    name: str
    start: State
    transitions: Mapping[tuple[State, Event], State]
    frequent: frozenset[Event] = frozenset()

    @property
    def states(self) -> tuple[State, ...]:
        """All of them, in the order of the table."""
        found = {self.start: None}
        for (state, _), target in self.transitions.items():
            found |= {state: None, target: None}
        return tuple(found)

    @property
    def events(self) -> tuple[Event, ...]:
        """All of them, in the order of the table."""
        return tuple(dict.fromkeys(event for _, event in self.transitions))


class StateMachine(Generic[State, Event]):
    """Where one thing stands. One thread makes its transitions; any may read `state` and `counts`."""

    def __init__(self, table: StateTable[State, Event]) -> None:
        self.table = table
        self.state: State = table.start
        #: (from, event) -> how often.
        self.counts: Counter[tuple[State, Event]] = Counter()
        self._transitions = table.transitions
        self._log = get()
        debugs = self._log.is_enabled_for(logging.DEBUG)
        self._told = frozenset(event for event in table.events if debugs or event not in table.frequent)

    def on(self, event: Event) -> None:
        """Change the state. IllegalTransition, and no change, if the table does not have it."""
        before = self.state
        change = before, event
        after = self._transitions.get(change)
        if after is None:
            raise IllegalTransition(f"{self.table.name}: {event!r} cannot happen in state {before!r}; report this")
        self.counts[change] += 1
        self.state = after
        if event in self._told:
            tell = self._log.debug if event in self.table.frequent else self._log.info
            tell("STATE_CHANGED", machine=self.table.name, before=before, event_name=event, after=after)
