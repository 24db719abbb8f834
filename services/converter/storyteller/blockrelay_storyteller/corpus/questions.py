"""Makes questions about a world and their answers, which come from the simulated world and never from the prose."""

import random
from dataclasses import dataclass
from enum import StrEnum

from blockrelay_storyteller.corpus.words import FOODS, HOLDERS, NUMBERS
from blockrelay_storyteller.corpus.world import World

_SINGULAR = {many: one for one, many in FOODS}


class Kind(StrEnum):
    """The kinds of questions."""

    HOLDER = "who has the thing"
    PERSON_PLACE = "where is the person"
    THING_PLACE = "where is the thing"
    COUNT = "how many"
    COLOUR = "what colour"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question in English and its one right answer, a full sentence.

    `subject` is (thing,), (person,) or, for COUNT, (owner, food in the plural).
    """

    kind: Kind
    subject: tuple[str, ...]
    text: str
    answer: str


def amount_of(food: str, amount: int) -> str:
    """Returns an amount of food in words: (apples, 1) gives "one apple", (apples, 0) gives "no apples".

    `food` is a plural of FOODS, and `amount` is 0 to MOST.
    """
    if amount == 0:
        return f"no {food}"
    return f"{NUMBERS[amount]} {_SINGULAR[food] if amount == 1 else food}"


def is_holder(owner: str) -> bool:
    """True for a container such as "the basket", False for a person."""
    return owner.removeprefix("the ") in HOLDERS


def subjects(world: World) -> list[tuple[Kind, tuple[str, ...]]]:
    """Returns all questions that have one right answer in this world, as (kind, subject), in a fixed order."""
    things = sorted(world.holders.keys() | world.lying.keys())
    return [
        *((Kind.HOLDER, (thing,)) for thing in sorted(world.holders)),
        *((Kind.PERSON_PLACE, (person,)) for person in sorted(world.places)),
        *((Kind.THING_PLACE, (thing,)) for thing in things),
        *((Kind.COUNT, key) for key in sorted(world.counts)),
        *((Kind.COLOUR, (thing,)) for thing in things if thing in world.colours),
    ]


def ask(world: World, kind: Kind, subject: tuple[str, ...], rng: random.Random) -> Question:
    """Returns a question in words chosen by `rng`, and its answer. `subject` is one from `subjects(world)`."""
    texts: tuple[str, ...]
    match kind:
        case Kind.HOLDER:
            (thing,) = subject
            texts = (f"Who has the {thing}?", f"Who has the {thing} now?", f"Who is holding the {thing}?")
            answer = f"The {thing} is with {world.holders[thing]}."
        case Kind.PERSON_PLACE:
            (person,) = subject
            texts = (f"Where is {person}?", f"Where is {person} now?")
            answer = f"{person} is {world.places[person].phrase()}."
        case Kind.THING_PLACE:
            (thing,) = subject
            texts = (f"Where is the {thing}?", f"Where is the {thing} now?")
            holder = world.holders.get(thing)
            answer = f"The {thing} is {world.lying[thing].phrase() if holder is None else f'with {holder}'}."
        case Kind.COUNT:
            owner, food = subject
            texts, answer = _count(world, owner, food)
        case Kind.COLOUR:
            (thing,) = subject
            texts = (f"What colour is the {thing}?",)
            answer = f"The colour of the {thing} is {world.colours[thing]}."
    return Question(kind=kind, subject=subject, text=rng.choice(texts), answer=answer)


def _count(world: World, owner: str, food: str) -> tuple[tuple[str, ...], str]:
    count = world.counts[owner, food]
    if is_holder(owner):
        texts = (
            f"How many {food} are left?",
            f"How many {food} are left in {owner}?",
            f"How many {food} are there in {owner}?",
        )
        verb = "is" if count == 1 else "are"
        return texts, f"There {verb} {amount_of(food, count)} in {owner}."
    texts = (f"How many {food} does {owner} have?", f"How many {food} does {owner} have now?")
    if all(other == owner for other, kind in world.counts if kind == food):
        texts = (*texts, f"How many {food} are left?")
    return texts, f"{owner} has {amount_of(food, count)}."
