"""The submission of one request as a table of states. Pure: `accept` performs its effects.

A request without an Idempotency-Key has a random id, so this gateway follows its log before ACCEPT. The id of a keyed
request may exist already, so it is followed after ACCEPT, which counts this gateway as a reader at once; until then the
request is only sought, which delays its cancellation.

    NEW --submit--> FOLLOWED --OK, EXISTS--> ACCEPTED          (without a key; EXISTS: this gateway repeated its ACCEPT)
    NEW_KEYED --submit--> SOUGHT --OK--> ACCEPTED
                                 --EXISTS--> FOUND             (the key was sent before)
    FOLLOWED, SOUGHT --REPEAT--> FOUND                         (a session step that ran before, under another id)
    FOLLOWED, SOUGHT --refused, lost--> GONE
    ACCEPTED, FOUND --withdraw--> GONE                         (a later request of the same submission failed)
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple


class State(Enum):
    """The states of one request. In FOLLOWED and SOUGHT its ACCEPT is under way."""

    NEW = auto()
    NEW_KEYED = auto()
    FOLLOWED = auto()
    SOUGHT = auto()
    ACCEPTED = auto()
    FOUND = auto()
    GONE = auto()


class Event(Enum):
    """The events of one request. OK, EXISTS and REPEAT are answers of ACCEPT.

    REFUSED is any other answer, and every error after which ACCEPT has certainly not run. LOST is an error after which
    it may have run.
    """

    SUBMIT = auto()
    OK = auto()
    EXISTS = auto()
    REPEAT = auto()
    REFUSED = auto()
    LOST = auto()
    WITHDRAW = auto()


class Effect(Enum):
    """The effects of a step, which are performed in the order of the table."""

    FOLLOW = auto()  # follow the request's log from now on
    SEEK = auto()  # a client asks for the request: delay its cancellation
    DATE = auto()  # set the time of creation that Redis returned
    JOIN = auto()  # share the log with readers that follow the request here already, if any
    ANNOUNCE = auto()  # count and log a new request
    RESUME = auto()  # follow the request that ACCEPT found, from its record
    DROP = auto()  # follow the request no longer, unless it has another reader
    RELEASE = auto()  # detach, like a reader that leaves
    TAKE_BACK = auto()  # end the request in Redis, unless it is followed here: its client gets an error
    LEAVE = auto()  # remove this gateway from the request's readers in Redis, unless it has one


class Step(NamedTuple):
    """The effects to perform and the state after them. If an effect fails, the request stays in the state before."""

    effects: tuple[Effect, ...]
    state: State


TABLE: Mapping[tuple[State, Event], Step] = {
    (State.NEW, Event.SUBMIT): Step((Effect.FOLLOW,), State.FOLLOWED),
    (State.NEW_KEYED, Event.SUBMIT): Step((Effect.SEEK,), State.SOUGHT),
    (State.FOLLOWED, Event.OK): Step((Effect.DATE, Effect.ANNOUNCE), State.ACCEPTED),
    (State.FOLLOWED, Event.EXISTS): Step((Effect.ANNOUNCE,), State.ACCEPTED),
    (State.FOLLOWED, Event.REPEAT): Step((Effect.DROP, Effect.RESUME), State.FOUND),
    (State.FOLLOWED, Event.REFUSED): Step((Effect.DROP,), State.GONE),
    (State.FOLLOWED, Event.LOST): Step((Effect.DROP, Effect.TAKE_BACK), State.GONE),
    (State.SOUGHT, Event.OK): Step((Effect.DATE, Effect.JOIN, Effect.ANNOUNCE), State.ACCEPTED),
    (State.SOUGHT, Event.EXISTS): Step((Effect.RESUME,), State.FOUND),
    (State.SOUGHT, Event.REPEAT): Step((Effect.RESUME,), State.FOUND),
    (State.SOUGHT, Event.REFUSED): Step((Effect.LEAVE,), State.GONE),
    # ACCEPT may have run, but other clients may have sent the same key: the request is left, not taken back.
    (State.SOUGHT, Event.LOST): Step((Effect.LEAVE,), State.GONE),
    (State.ACCEPTED, Event.WITHDRAW): Step((Effect.DROP, Effect.TAKE_BACK), State.GONE),
    (State.FOUND, Event.WITHDRAW): Step((Effect.RELEASE,), State.GONE),
}


def step(state: State, event: Event) -> Step:
    """Looks up the step for an event. Raises KeyError for an event that cannot happen in this state."""
    return TABLE[state, event]


def answered(status: str) -> Event:
    """The event for the status of an answer of ACCEPT."""
    known = {"OK": Event.OK, "EXISTS": Event.EXISTS, "REPEAT": Event.REPEAT}
    return known.get(status, Event.REFUSED)
