"""The text that the bundled model is trained on: the same everywhere, and every answer true."""

import copy
import hashlib
import random
import re

import pytest
from jinja2 import Template

from blockrelay_storyteller.corpus.documents import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    END_OF_TURN,
    SYSTEM,
    USER,
    Document,
    document,
    questions,
    replay,
    text_of,
)
from blockrelay_storyteller.corpus.questions import Kind, ask, subjects
from blockrelay_storyteller.corpus.stories import Story, tell
from blockrelay_storyteller.corpus.words import FOODS, MOST, NUMBERS, PLACES
from blockrelay_storyteller.corpus.world import Give, ImpossibleEvent, Move, Put, Share, Take, World

KITCHEN, GARDEN = PLACES[0], PLACES[1]


def stories(count: int, *, plain: bool = False) -> list[Story]:
    return [tell(random.Random(f"test:{index}"), beats=index % 12, plain=plain) for index in range(count)]


def documents(count: int) -> list[Document]:
    return [document("test", index, drill=index % 4 == 3) for index in range(count)]


def test_a_ball_that_is_given_away_and_carried_off_is_where_its_new_holder_is() -> None:
    world = World(
        places={"Mia": KITCHEN, "Tom": KITCHEN}, lying={"ball": KITCHEN}, counts={("the basket", "apples"): 3}
    )
    for event in (
        Take(person="Mia", thing="ball"),
        Give(giver="Mia", receiver="Tom", thing="ball"),
        Move(person="Tom", place=GARDEN),
        Share(giver="the basket", receiver="Tom", food="apples", amount=2),
    ):
        world.apply(event)
    answers = {ask(world, kind, subject, random.Random(0)).answer for kind, subject in subjects(world)}
    assert answers == {
        "The ball is with Tom.",
        "Mia is in the kitchen.",
        "Tom is in the garden.",
        "There is one apple in the basket.",
        "Tom has two apples.",
    }


@pytest.mark.parametrize(
    "event",
    [
        Give(giver="Mia", receiver="Tom", thing="ball"),
        Take(person="Tom", thing="ball"),
        Put(person="Tom", thing="ball"),
        Move(person="Mia", place=KITCHEN),
        Share(giver="Mia", receiver="Tom", food="apples", amount=3),
    ],
)
def test_an_event_that_cannot_happen_is_refused_and_changes_nothing(event: Give | Take | Put | Move | Share) -> None:
    world = World(
        places={"Mia": KITCHEN, "Tom": GARDEN},
        holders={"ball": "Mia"},
        counts={("Mia", "apples"): 2, ("Tom", "apples"): 0},
    )
    before = world.copy()
    with pytest.raises(ImpossibleEvent):
        world.apply(event)
    assert world == before


def test_the_same_seed_gives_the_same_text_for_ever() -> None:
    text = "".join(text_of(segments) for segments in documents(300))
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN


def test_documents_differ_from_each_other_and_between_streams() -> None:
    stories_told = [text_of(segments) for segments in documents(300) if len(text_of(segments)) > 300]
    assert len(set(stories_told)) == len(stories_told)
    assert text_of(document("test", 1)) != text_of(document("other", 1))


def test_every_answer_follows_from_the_sentences_alone() -> None:
    """Reads the prose back with regular expressions and answers from that: knows nothing of the simulated world."""
    checked = 0
    for index, story in enumerate(stories(300, plain=True)):
        reader = Reader()
        rng = random.Random(index)
        for text, world in replay(story):
            reader.read(text)
            for question in questions(rng, world, 3):
                assert reader.answer(question.kind, question.subject) in question.answer, (story, question)
                checked += 1
    assert checked > 3000


def test_questions_of_one_moment_have_different_subjects() -> None:
    for index, story in enumerate(stories(50)):
        for _, world in replay(story):
            asked = questions(random.Random(index), world, 5)
            assert len({(question.kind, question.subject) for question in asked}) == len(asked)


def test_every_document_ends_once_and_no_piece_ends_in_a_space() -> None:
    for segments in documents(300):
        assert segments[-1].text == END_OF_TEXT
        assert text_of(segments).count(END_OF_TEXT) == 1
        assert not any(segment.text.endswith((" ", "\n")) for segment in segments)


def test_the_chat_template_writes_what_the_model_was_trained_on() -> None:
    template = Template(CHAT_TEMPLATE)
    seen = 0
    for segments in documents(300):
        if not segments[0].text.startswith((USER, SYSTEM)):
            continue
        body = "".join(segment.text for segment in segments[:-1])
        messages = [
            {"role": role, "content": text} for role, text in re.findall(r"<\|(\w+)\|>(.*?)<\|end\|>", body, re.S)
        ]
        assert template.render(messages=messages) == body
        prompt = template.render(messages=messages[:-1], add_generation_prompt=True)
        assert body == prompt + messages[-1]["content"] + END_OF_TURN
        seen += 1
    assert seen > 100


def test_answers_stand_as_they_are_in_the_text() -> None:
    answered = [segment for segments in documents(300) for segment in segments if segment.question]
    assert len(answered) > 500
    for segment in answered:
        assert segment.question is not None
        assert segment.text.strip().removesuffix("<|end|>") == segment.question.answer


class Reader:
    """What a reader knows after some plain sentences. Independent of `World`: it sees only the text."""

    def __init__(self) -> None:
        self.at: dict[str, str] = {}
        self.has: dict[str, str] = {}
        self.lies: dict[str, str] = {}
        self.colour: dict[str, str] = {}
        self.count: dict[tuple[str, str], int] = {}

    def read(self, text: str) -> None:
        for sentence in re.findall(r"[^.]+\.", text):
            said = sentence.strip()
            known = copy.deepcopy(vars(self))
            self._sentence(re.sub(LINKS, "", said))
            assert not said.startswith("Now ") or vars(self) == known, f"does not follow from what was said: {said}"

    def answer(self, kind: Kind, subject: tuple[str, ...]) -> str:
        """The part of the answer that matters."""
        match kind:
            case Kind.HOLDER:
                return f"with {self.has[subject[0]]}"
            case Kind.PERSON_PLACE:
                return self.at[subject[0]]
            case Kind.THING_PLACE:
                return f"with {self.has[subject[0]]}" if subject[0] in self.has else self.lies[subject[0]]
            case Kind.COUNT:
                amount = self.count.get((subject[0], stem(subject[1])), 0)
                return f" {NUMBERS[amount]} " if amount else " no "
            case Kind.COLOUR:
                return self.colour[subject[0]]

    def _sentence(self, text: str) -> None:
        number = rf"({'|'.join(NUMBERS[1:])}|no) (\w+)"
        where = r"(in the \w+)"
        if found := re.fullmatch(rf"(.+) had {number}\.", text):
            self._set(found[1], found[3], found[2])
        elif found := re.fullmatch(rf"[Tt]here (?:was|were) {number} in (the \w+)\.", text):
            self._set(found[3], found[2], found[1])
        elif found := re.fullmatch(rf"(\w+) (?:found|bought) {number}\.", text):
            self._add(found[1], found[3], NUMBERS.index(found[2]))
        elif found := re.fullmatch(rf"(\w+) (?:ate|lost) {number}\.", text):
            self._add(found[1], found[3], -NUMBERS.index(found[2]))
        elif found := re.fullmatch(rf"(\w+) took {number} (?:from|out of) (the \w+)\.", text):
            self._add(found[1], found[3], NUMBERS.index(found[2]))
            self._add(found[4], found[3], -NUMBERS.index(found[2]))
        elif found := re.fullmatch(rf"(\w+) gave {number} to (\w+)\.", text):
            self._pass(found[1], found[4], found[3], found[2])
        elif found := re.fullmatch(rf"(\w+) gave (\w+) {number}\.", text):
            self._pass(found[1], found[2], found[4], found[3])
        elif found := re.fullmatch(r"(?:\w+ (?:gave|handed|brought) )?[Tt]he (\w+) (?:was with|to) (\w+)\.", text):
            self.has[found[1]] = found[2]
        elif found := re.fullmatch(rf"[Tt]he (\w+) was {where}\.", text):
            self.lies[found[1]] = found[2]
        elif found := re.fullmatch(r"The colour of the (\w+) was (\w+)\.", text):
            self.colour[found[1]] = found[2]
        elif found := re.fullmatch(r"(\w+) (?:took|picked up|found) the (\w+)\.", text):
            self.has[found[2]] = found[1]
        elif found := re.fullmatch(rf"(\w+) (?:put|left) the (\w+) {where}\.", text):
            del self.has[found[2]]
            self.lies[found[2]] = found[3]
        elif found := re.fullmatch(r"(\w+) (?:went|walked|ran) to (the \w+)\.", text):
            (phrase,) = (place.phrase() for place in PLACES if place.phrase().endswith(found[2]))
            self.at[found[1]] = phrase
        else:
            clauses = re.findall(rf"((?:\w+, )*\w+(?: and \w+)?) (?:was|were) {where}", text)
            assert clauses, f"a sentence that says nothing: {text}"
            for names, phrase in clauses:
                self.at.update(dict.fromkeys(re.findall(r"[A-Z]\w+", names), phrase))

    def _set(self, owner: str, food: str, amount: str) -> None:
        known = 0 if amount == "no" else NUMBERS.index(amount)
        assert self.count.get((owner, stem(food)), known) == known, "the story contradicts itself"
        self.count[owner, stem(food)] = known

    def _add(self, owner: str, food: str, amount: int) -> None:
        self.count[owner, stem(food)] = self.count.get((owner, stem(food)), 0) + amount
        assert 0 <= self.count[owner, stem(food)] <= MOST

    def _pass(self, giver: str, receiver: str, food: str, amount: str) -> None:
        self._add(giver, food, -NUMBERS.index(amount))
        self._add(receiver, food, NUMBERS.index(amount))


def stem(food: str) -> str:
    """One name for singular and plural."""
    return {many: one for one, many in FOODS}.get(food, food)


LINKS = r"^(First|Then|Next,|Soon|After that,|Later,|In the evening,|At last|Now) "
GOLDEN = "928c0dc67f15b28792e7101facd32e0b45b348fd82c1435b65be43057bfb0b64"
