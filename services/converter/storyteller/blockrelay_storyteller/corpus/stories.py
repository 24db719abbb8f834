"""Generates stories: a setting, then beats that each tell one event of the world, then an ending.

The random generator that is passed decides everything.
"""

import random
from dataclasses import dataclass

from blockrelay_storyteller.corpus import prose
from blockrelay_storyteller.corpus.questions import is_holder
from blockrelay_storyteller.corpus.words import (
    BOYS,
    COLOURS,
    FOODS,
    GIRLS,
    HOLDERS,
    MOST,
    NAME_ENDS,
    NAME_MIDDLES,
    NAME_STARTS,
    PLACES,
    THINGS,
    Place,
)
from blockrelay_storyteller.corpus.world import Event, Gain, Give, Lose, Move, Put, Share, Take, World

#: Share of persons whose name is made up from syllables.
MADE_UP_NAMES = 0.0
#: Share of changed counts that the story states again ("Now Mia had two apples"). For the others, a reader must add;
#: the model learns that only in a longer training.
SUMMED_UP = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One event of a story and the sentences that tell it."""

    text: str
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A story with its events. `setting` is the world that `opening` describes: copy it before changing it."""

    people: tuple[str, ...]
    things: tuple[str, ...]
    setting: World
    opening: str
    beats: tuple[Beat, ...]
    ending: str


def tell(rng: random.Random, *, beats: int, plain: bool = False) -> Story:
    """Returns a story of `beats` events.

    With `plain`, opening and beats have only sentences that state facts of the world, and no words that count events.
    The ending states no fact and is always there.
    """
    people = _cast(rng)
    names = tuple(prose.name_of(person) for person in people)
    places = rng.sample(PLACES, rng.randint(2, 4))
    things = tuple(rng.sample(THINGS, rng.randint(1, 3)))
    world = World(places={name: rng.choice(places) for name in names})
    for thing in things:
        if rng.random() < 0.6:
            world.colours[thing] = rng.choice(COLOURS)
        if rng.random() < 0.5:
            world.holders[thing] = rng.choice(names)
        else:
            world.lying[thing] = rng.choice(places)
    foods = _larder(rng, names, world)
    opening = prose.opening(rng, people, world, plain=plain)
    setting = world.copy()
    story_beats: list[Beat] = []
    unstated: set[tuple[str, str]] = set()
    for number in range(beats):
        event = _next_event(rng, world, places, foods, previous=story_beats[-1].event if story_beats else None)
        world.apply(event)
        link = prose.link_word(rng, number, beats, plain=plain)
        text = prose.tell_event(rng, event, world, link)
        text += prose.outcome(event, world)
        text += _state_counts(rng, event, world, unstated)
        if not plain:
            text += prose.aside(rng, event)
        story_beats.append(Beat(text=text, event=event))
    ending = prose.ending(rng, names)
    return Story(people=names, things=things, setting=setting, opening=opening, beats=tuple(story_beats), ending=ending)


def _cast(rng: random.Random) -> list[prose.Person]:
    people: dict[str, prose.Person] = {}
    wanted = rng.choice((2, 2, 2, 3, 3, 4))
    while len(people) < wanted:
        girl = rng.random() < 0.5
        name = rng.choice(GIRLS if girl else BOYS)
        if rng.random() < MADE_UP_NAMES:
            middle = rng.choice(NAME_MIDDLES) if rng.random() < 0.6 else ""
            name = rng.choice(NAME_STARTS) + middle + rng.choice(NAME_ENDS)
        people[name] = prose.Person(name=name, girl=girl)
    return list(people.values())


def _larder(rng: random.Random, names: tuple[str, ...], world: World) -> list[str]:
    """Puts food into the world in place: none, in a holder, or with persons. Returns the kinds of food."""
    style = rng.random()
    if style < 0.3:
        return []
    food = rng.choice(FOODS)[1]
    if style < 0.6:
        world.counts[f"the {rng.choice(HOLDERS)}", food] = rng.randint(3, MOST)
    else:
        for name in rng.sample(names, rng.randint(1, 2)):
            world.counts[name, food] = rng.randint(1, 7)
    return [food]


def _next_event(
    rng: random.Random, world: World, places: list[Place], foods: list[str], *, previous: Event | None
) -> Event:
    """Returns a random possible event, of another type than `previous` if there is one.

    Weights favour the types that are seldom possible.
    """
    names = sorted(world.places)
    choices: list[tuple[float, list[Event]]] = []
    gives: list[Event] = [
        Give(giver=giver, receiver=other, thing=thing)
        for thing, giver in sorted(world.holders.items())
        for other in names
        if other != giver and world.places[other] == world.places[giver]
    ]
    choices.append((4.0, gives))
    takes: list[Event] = [
        Take(person=name, thing=thing)
        for thing, place in sorted(world.lying.items(), key=lambda item: item[0])
        for name in names
        if world.places[name] == place
    ]
    choices.append((3.0, takes))
    choices.append((1.0, [Put(person=name, thing=thing) for thing, name in sorted(world.holders.items())]))
    choices.append((2.5, [Move(person=n, place=p) for n in names for p in places if world.places[n] != p]))
    choices += [(4.0, _food_events(rng, world, food)) for food in foods]
    fresh = [(weight, [event for event in events if type(event) is not type(previous)]) for weight, events in choices]
    possible = [(weight, events) for weight, events in fresh if events]
    possible = possible or [(weight, events) for weight, events in choices if events]
    (events,) = rng.choices([events for _, events in possible], [weight for weight, _ in possible])
    return rng.choice(events)


def _food_events(rng: random.Random, world: World, food: str) -> list[Event]:
    """Returns, for each owner, one event of each type that is possible, with a random amount."""
    owners = sorted((owner, count) for (owner, kind), count in world.counts.items() if kind == food)
    events: list[Event] = []
    for owner, count in owners:
        if count < MOST and not is_holder(owner):
            events.append(Gain(owner=owner, food=food, amount=rng.randint(1, min(4, MOST - count))))
        if count == 0:
            continue
        if not is_holder(owner):
            events.append(Lose(owner=owner, food=food, amount=rng.randint(1, min(3, count))))
        receivers = [name for name in sorted(world.places) if name != owner]
        if not is_holder(owner):
            receivers = [n for n in receivers if (n, food) in world.counts and world.places[n] == world.places[owner]]
        for receiver in receivers:
            room = MOST - world.counts.get((receiver, food), 0)
            if room > 0:
                amount = rng.randint(1, min(4, count, room))
                events.append(Share(giver=owner, receiver=receiver, food=food, amount=amount))
    return events


def _state_counts(rng: random.Random, event: Event, world: World, unstated: set[tuple[str, str]]) -> str:
    """Returns the new counts in words, or "" for some of the changes.

    The change after an unstated one is always stated, so that a reader never adds up more than two changes.
    """
    match event:
        case Gain(owner=owner, food=food) | Lose(owner=owner, food=food):
            changed = [(owner, food)]
        case Share(giver=giver, receiver=receiver, food=food):
            changed = [(giver, food), (receiver, food)]
        case _:
            return ""
    stated = [key for key in changed if key in unstated or rng.random() < SUMMED_UP]
    unstated.difference_update(stated)
    unstated.update(key for key in changed if key not in stated)
    return prose.counts(rng, [(owner, food, world.counts[owner, food]) for owner, food in stated])
