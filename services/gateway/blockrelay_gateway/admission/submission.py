"""How one request is submitted, as a table of states. Pure: `accept` performs what it says.

A request without an Idempotency-Key has a random id, so this gateway follows its log before ACCEPT. The id of a keyed
one may exist already, so it is followed after ACCEPT, which counts this gateway as a reader at once; until then the
request is only sought, which delays its cancellation.

    NEW --submit--> FOLLOWED --OK, EXISTS--> ACCEPTED          (without a key; EXISTS: ACCEPT of ours that was repeated)
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
    """Of one request. In FOLLOWED and SOUGHT its ACCEPT is under way."""

    NEW = auto()
    NEW_KEYED = auto()
    FOLLOWED = auto()
    SOUGHT = auto()
    ACCEPTED = auto()
    FOUND = auto()
    GONE = auto()


class Event(Enum):
    """What happens to it. The first three answers are ACCEPT's; REFUSED is any other answer, and every error after
    which ACCEPT has certainly not run; LOST is one after which it may have run."""

    SUBMIT = auto()
    OK = auto()
    EXISTS = auto()
    REPEAT = auto()
    REFUSED = auto()
    LOST = auto()
    WITHDRAW = auto()


class Effect(Enum):
    """What to do, in the order of the table."""

    FOLLOW = auto()  # its log, from now on
    SEEK = auto()  # a client asks for it: delay its cancellation
    DATE = auto()  # it was created when Redis says
    JOIN = auto()  # those who follow it here already, if any
    ANNOUNCE = auto()  # count and log a new request
    RESUME = auto()  # follow the request that ACCEPT found, from its record
    DROP = auto()  # follow it no longer, unless it has another reader
    RELEASE = auto()  # as by a reader that leaves
    TAKE_BACK = auto()  # from Redis, unless it is followed here: the client is told that it is not accepted
    LEAVE = auto()  # take back in Redis that this gateway reads it, unless it does


class Step(NamedTuple):
    """Do the effects, then be in the state. If an effect fails, the request is still in the state before."""

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
    # Its ACCEPT may have run, but the request is its key's, and may have other clients: it is left, not taken back.
    (State.SOUGHT, Event.LOST): Step((Effect.LEAVE,), State.GONE),
    (State.ACCEPTED, Event.WITHDRAW): Step((Effect.DROP, Effect.TAKE_BACK), State.GONE),
    (State.FOUND, Event.WITHDRAW): Step((Effect.RELEASE,), State.GONE),
}


def step(state: State, event: Event) -> Step:
    """Raises KeyError for an event that cannot happen in this state."""
    return TABLE[state, event]


def answered(status: str) -> Event:
    """The event of an answer of ACCEPT."""
    known = {"OK": Event.OK, "EXISTS": Event.EXISTS, "REPEAT": Event.REPEAT}
    return known.get(status, Event.REFUSED)
