"""Simulates the world of the stories: places of people, holders of things, counts of food. It writes no prose.

Stories change a `World` only with `apply`; an impossible event raises `ImpossibleEvent` and changes nothing.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from blockrelay_storyteller.corpus.words import MOST, Place


class ImpossibleEvent(ValueError):
    """The error for an event that cannot happen in the present state of the world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A person goes to another place; the things that the person holds move too."""

    person: str
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """A person picks up a thing that lies where the person is."""

    person: str
    thing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """A person puts down a thing; it stays at the person's place."""

    person: str
    thing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Give:
    """A person hands a thing to another person at the same place."""

    giver: str
    receiver: str
    thing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """An owner (a person or a holder such as "the basket") gets `amount` pieces of food that are new in the world."""

    owner: str
    food: str
    amount: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lose:
    """An owner loses `amount` pieces of food, which leave the world (eaten or lost)."""

    owner: str
    food: str
    amount: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """An owner passes `amount` pieces of food to another owner."""

    giver: str
    receiver: str
    food: str
    amount: int


Event: TypeAlias = Move | Take | Put | Give | Gain | Lose | Share


@dataclass(slots=True, kw_only=True)
class World:
    """The mutable state of a world. Each thing is either in `holders` or in `lying`."""

    places: dict[str, Place] = field(default_factory=dict[str, Place])
    """The place of each person."""
    colours: dict[str, str] = field(default_factory=dict[str, str])
    """The colour of each thing that has one."""
    holders: dict[str, str] = field(default_factory=dict[str, str])
    """The person that holds each thing."""
    lying: dict[str, Place] = field(default_factory=dict[str, Place])
    """The place of each thing that no person holds."""
    counts: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Pieces of food, 0 to MOST, by (owner, food in the plural)."""

    def copy(self) -> "World":
        """Returns a world that shares no mutable state with this one."""
        return World(
            places=dict(self.places),
            colours=dict(self.colours),
            holders=dict(self.holders),
            lying=dict(self.lying),
            counts=dict(self.counts),
        )

    def place_of(self, thing: str) -> Place:
        """Returns the place of a thing of this world: where it lies, or where its holder is."""
        lying = self.lying.get(thing)
        return self.places[self.holders[thing]] if lying is None else lying

    def apply(self, event: Event) -> None:
        """Changes the world by one event. Raises ImpossibleEvent and leaves the world unchanged if it cannot happen.

        An amount must be above 0; one below is not refused. Owners of food may be new, and may be at different places.
        """
        match event:
            case Move(person=person, place=place):
                _check(person in self.places and self.places[person] != place, event)
                self.places[person] = place
            case Take(person=person, thing=thing):
                _check(thing in self.lying and self.lying[thing] == self.places.get(person), event)
                del self.lying[thing]
                self.holders[thing] = person
            case Put(person=person, thing=thing):
                _check(self.holders.get(thing) == person, event)
                del self.holders[thing]
                self.lying[thing] = self.places[person]
            case Give(giver=giver, receiver=receiver, thing=thing):
                _check(self.holders.get(thing) == giver and giver != receiver, event)
                _check(receiver in self.places and self.places[giver] == self.places[receiver], event)
                self.holders[thing] = receiver
            case Gain(owner=owner, food=food, amount=amount):
                self._change(event, {owner: amount}, food)
            case Lose(owner=owner, food=food, amount=amount):
                self._change(event, {owner: -amount}, food)
            case Share(giver=giver, receiver=receiver, food=food, amount=amount):
                _check(giver != receiver, event)
                self._change(event, {giver: -amount, receiver: amount}, food)

    def _change(self, event: Event, changes: dict[str, int], food: str) -> None:
        after = {(owner, food): self.counts.get((owner, food), 0) + change for owner, change in changes.items()}
        _check(all(change != 0 for change in changes.values()), event)
        _check(all(0 <= count <= MOST for count in after.values()), event)
        self.counts.update(after)


def _check(possible: bool, event: Event) -> None:
    if not possible:
        raise ImpossibleEvent(f"cannot happen now: {event}")
