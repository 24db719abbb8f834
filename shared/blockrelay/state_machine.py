"""State machines as data: a table of legal transitions, and a machine that makes them, counts them and logs them.

`observability.states` shows the counts and the present state as metrics. Changes are logged as STATE_CHANGED, those
that happen many times a second at level DEBUG. An event that the present state does not allow is a bug, and raises
IllegalTransition.
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
    """The legal transitions of one kind of state machine."""

    name: str
    start: State
    transitions: Mapping[tuple[State, Event], State]  # (state, event) -> next state
    frequent: frozenset[Event] = frozenset()  # events that happen many times a second

    @property
    def states(self) -> tuple[State, ...]:
        """All states, in the order of the table."""
        states = {self.start: None}
        for (state, _), target in self.transitions.items():
            states |= {state: None, target: None}
        return tuple(states)

    @property
    def events(self) -> tuple[Event, ...]:
        """All events, in the order of the table."""
        return tuple(dict.fromkeys(event for _, event in self.transitions))


class StateMachine(Generic[State, Event]):
    """The state of one thing. Only one thread may make transitions; any thread may read `state` and `counts`.

    Call `logs.configure` first: a machine reads the log level and the node id when it is made.
    """

    def __init__(self, table: StateTable[State, Event]) -> None:
        self.table = table
        self.state: State = table.start
        #: Number of transitions, by (state before, event).
        self.counts: Counter[tuple[State, Event]] = Counter()
        self._transitions = table.transitions
        self._log = get()
        debugs = self._log.is_enabled_for(logging.DEBUG)
        self._logged = frozenset(event for event in table.events if debugs or event not in table.frequent)

    def on(self, event: Event) -> None:
        """Makes the transition for `event`. Raises IllegalTransition, without a change, if the table has none."""
        before = self.state
        change = before, event
        after = self._transitions.get(change)
        if after is None:
            raise IllegalTransition(f"{self.table.name}: {event!r} cannot happen in state {before!r}; report this")
        self.counts[change] += 1
        self.state = after
        if event in self._logged:
            log = self._log.debug if event in self.table.frequent else self._log.info
            log("STATE_CHANGED", machine=self.table.name, before=before, event_name=event, after=after)
