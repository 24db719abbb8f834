"""Writes English sentences for the settings and events of a world.

No sentence states a fact that could contradict the world.
"""

import random
from dataclasses import dataclass

from blockrelay_storyteller.corpus.questions import amount_of, is_holder
from blockrelay_storyteller.corpus.words import ANIMALS, HOBBIES, TIMES, TRAITS, WEATHERS
from blockrelay_storyteller.corpus.world import Event, Gain, Give, Lose, Move, Put, Share, Take, World

#: Openings of the sentences of a story's events, in their order.
_LINKS = ("First ", "Then ", "Next, ", "After that, ", "Soon ", "Later, ", "In the evening, ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A person of a story; `girl` decides the pronouns."""

    name: str
    girl: bool


def name_of(person: Person) -> str:
    """Returns the person's name."""
    return person.name


def listed(words: list[str]) -> str:
    """Joins words for a sentence: ["a", "b", "c"] gives "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def with_article(noun: str) -> str:
    """Returns the noun with "a" or "an" before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def opening(rng: random.Random, people: list[Person], world: World, *, plain: bool) -> str:
    """Returns the sentences before the first event: the places of people and things, colours, and amounts of food.

    People come in a random order, then things in a random order, then food. Without `plain`, an introduction of
    `people` (2 to 4, those of `world`) comes first; it states no fact of the world.
    """
    sentences = [] if plain else _introduction(rng, people)
    facts = _places(rng, world)
    facts += _things(rng, world)
    facts += _food(rng, world)
    return " ".join(sentences + facts)


def _introduction(rng: random.Random, people: list[Person]) -> list[str]:
    first = people[0]
    names = [person.name for person in people]
    kind = "girl" if first.girl else "boy"
    pronoun = "She" if first.girl else "He"
    number = {2: "two", 3: "three", 4: "four"}[len(people)]
    style = rng.random()
    if style < 0.4:
        sentences = [f"Once upon a time there were {number} friends, {listed(names)}."]
    elif style < 0.75:
        trait, other = rng.sample(TRAITS, 2)
        sentences = [f"Once upon a time there was {with_article(trait)} {kind} named {first.name}."]
        if rng.random() < 0.6:
            sentences.append(f"{pronoun} was also {other}, and {pronoun.lower()} loved to {rng.choice(HOBBIES)}.")
        friends = "friend was" if len(names) == 2 else "friends were"
        sentences.append(f"{'Her' if first.girl else 'His'} {friends} {listed(names[1:])}.")
    else:
        sentences = [f"{rng.choice(TIMES)}, {listed(names)} wanted to play."]
    if rng.random() < 0.5:
        sentences.append(f"{rng.choice(WEATHERS)}.")
    return sentences


def _places(rng: random.Random, world: World) -> list[str]:
    people = rng.sample(sorted(world.places), len(world.places))
    return [place_of(person, world) for person in people]


def place_of(person: str, world: World) -> str:
    """Returns a sentence with the place of a person."""
    return f"{person} was {world.places[person].phrase()}."


def state_of(thing: str, world: World) -> str:
    """Returns a sentence, without a capital, with the holder of a thing or the place where it lies."""
    holder = world.holders.get(thing)
    return f"the {thing} was {f'with {holder}' if holder is not None else world.lying[thing].phrase()}."


def _things(rng: random.Random, world: World) -> list[str]:
    """Returns sentences on the state of each thing, in the words of the answers and with the thing first.

    With one order of words, the model needs only one kind of lookup.
    """
    sentences: list[str] = []
    for thing in rng.sample(things := sorted(world.holders.keys() | world.lying.keys()), len(things)):
        sentences.append(_capital(state_of(thing, world)))
        if colour := world.colours.get(thing):
            sentences.append(f"The colour of the {thing} was {colour}.")
    return sentences


def _food(rng: random.Random, world: World) -> list[str]:
    return [
        part for owner, food in world.counts for part in [counts_of(owner, food, world.counts[owner, food])] if part
    ]


def counts_of(owner: str, food: str, count: int) -> str:
    """Returns a sentence with the number of pieces of a food that an owner has."""
    if is_holder(owner):
        return f"There {'was' if count == 1 else 'were'} {amount_of(food, count)} in {owner}."
    return f"{owner} had {amount_of(food, count)}."


def counts(rng: random.Random, stated: list[tuple[str, str, int]]) -> str:
    """Returns counts as sentences that each begin with a space; "" for none.

    `stated` has the owner, the food in the plural and the count of each. `rng` is not used.
    """
    text = ""
    for owner, food, count in stated:
        if is_holder(owner):
            verb = "was" if count == 1 else "were"
            text += f" Now there {verb} {amount_of(food, count)} in {owner}."
        else:
            text += f" Now {owner} had {amount_of(food, count)}."
    return text


def outcome(event: Event, world: World) -> str:
    """Returns a sentence, after a space, on the new state after an event; "" for events of food (see `counts`).

    `world` is the world after the event.
    """
    match event:
        case Move(person=person):
            return f" Now {place_of(person, world)}"
        case Take(thing=thing) | Put(thing=thing) | Give(thing=thing):
            return f" Now {state_of(thing, world)}"
        case _:
            return ""


def link_word(rng: random.Random, number: int, beats: int, *, plain: bool) -> str:
    """Returns the words, with a space at their end, that begin the sentence for event `number` (from 0) of `beats`.

    A story counts its events by these words, so that the model that tells one knows when to end it. With `plain` they
    are random and count nothing. "": the sentence begins without such words.
    """
    if plain:
        return rng.choice(("", "", "", "Then ", "Soon ", "After that, ", "Later, "))
    if number == beats - 1:
        return "At last "
    return _LINKS[number] if number < len(_LINKS) else "Then "


def tell_event(rng: random.Random, event: Event, world: World, link: str) -> str:
    """Returns one sentence, in the past tense, that tells the event. `world` is the world after the event.

    `link` begins the sentence: the words from `link_word`, with a space at their end, or "".
    """
    match event:
        case Move(person=person, place=place):
            goal = f"to the {place.name}"
            sentences = (f"{person} went {goal}.", f"{person} walked {goal}.", f"{person} ran {goal}.")
        case Take(person=person, thing=thing):
            sentences = (
                f"{person} took the {thing}.",
                f"{person} picked up the {thing}.",
                f"{person} found the {thing}.",
            )
        case Put(person=person, thing=thing):
            place = world.lying[thing].phrase()
            sentences = (f"{person} put the {thing} {place}.", f"{person} left the {thing} {place}.")
        case Give(giver=giver, receiver=receiver, thing=thing):
            sentences = (
                f"{giver} gave the {thing} to {receiver}.",
                f"{giver} handed the {thing} to {receiver}.",
                f"{giver} brought the {thing} to {receiver}.",
            )
        case Gain(owner=owner, food=food, amount=amount):
            more = amount_of(food, amount)
            sentences = (f"{owner} found {more}.", f"{owner} bought {more}.")
        case Lose(owner=owner, food=food, amount=amount):
            sentences = (f"{owner} ate {amount_of(food, amount)}.", f"{owner} lost {amount_of(food, amount)}.")
        case Share(giver=giver, receiver=receiver, food=food, amount=amount) if is_holder(giver):
            some = amount_of(food, amount)
            sentences = (f"{receiver} took {some} from {giver}.", f"{receiver} took {some} out of {giver}.")
        case Share(giver=giver, receiver=receiver, food=food, amount=amount):
            some = amount_of(food, amount)
            sentences = (f"{giver} gave {some} to {receiver}.", f"{giver} gave {receiver} {some}.")
    sentence = rng.choice(sentences)
    return link + sentence if link else _capital(sentence)


def aside(rng: random.Random, event: Event) -> str:
    """Returns a sentence, after a space, that follows an event and states no fact of the world; often ""."""
    if rng.random() < 0.6:
        return ""
    match event:
        case Give(giver=giver, receiver=receiver):
            said = (
                f'"Thank you, {giver}!" said {receiver}.',
                f'"Here you are," said {giver}.',
                f"{receiver} was very happy.",
            )
        case Share(giver=giver, receiver=receiver) if not is_holder(giver):
            said = (
                f'"Thank you, {giver}!" said {receiver}.',
                f"It was kind of {giver} to share.",
                f"{receiver} smiled.",
            )
        case Move(person=person, place=place):
            animal = rng.choice(ANIMALS)
            said = (
                f"{_capital(with_article(animal))} sat there.",
                f"{person} was tired.",
                f"It was nice {place.phrase()}.",
            )
        case Take(person=person, thing=thing) | Put(person=person, thing=thing):
            said = (f"{person} liked the {thing}.", f'"What a nice {thing}!" said {person}.', f"{person} laughed.")
        case Lose(owner=person) | Gain(owner=person) | Share(receiver=person):
            said = (f"{person} was happy.", f"{person} was hungry.", f'"I like them," said {person}.')
    return f" {rng.choice(said)}"


def ending(rng: random.Random, names: tuple[str, ...]) -> str:
    """Returns the last sentences of a story with the people `names`."""
    closing = (
        f"{listed(list(names))} were happy.",
        "It was a good day.",
        f"{rng.choice(names)} told a joke, and everybody laughed.",
        "The friends sang a song together.",
        "They were good friends for ever after.",
        f'"What a lovely day!" said {rng.choice(names)}.',
    )
    return f"{rng.choice(closing)} The end."


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
