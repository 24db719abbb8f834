"""Generates training documents: stories and questions in the forms in which people will prompt the model.

A document is a list of segments; the text of a document is their concatenation. Segments that are answers are marked,
so that training can weight them and evaluation can find them. No segment ends in a space, so that tokenising each
segment by itself gives the same tokens as the whole text.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from blockrelay_storyteller.corpus.prose import with_article
from blockrelay_storyteller.corpus.questions import Kind, Question, ask, subjects
from blockrelay_storyteller.corpus.stories import Story, tell
from blockrelay_storyteller.corpus.world import World

#: The token that ends a document; also the padding.
END_OF_TEXT: Final = "<|endoftext|>"
#: The token that ends a turn of a chat.
END_OF_TURN: Final = "<|end|>"
SYSTEM: Final = "<|system|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
SPECIALS: Final = (END_OF_TEXT, END_OF_TURN, SYSTEM, USER, ASSISTANT)

#: The Jinja template that Hugging Face tokenizers render; it gives the same text as `_turn`.
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_WEIGHTS: Final = {
    Kind.HOLDER: 4.0,
    Kind.PERSON_PLACE: 2.5,
    Kind.THING_PLACE: 3.0,
    Kind.COUNT: 4.0,
    Kind.COLOUR: 3.0,
}
_SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You tell stories.",
    "You are a kind story teller.",
    "Answer the question.",
    "You are a friendly assistant. Answer in one sentence.",
)
_GREETINGS: Final = (
    "Hello!",
    "Hi!",
    "Hello",
    "Hi",
    "Good morning!",
    "Hey!",
    "Who are you?",
    "What can you do?",
    "Help",
)
_GREETING_REPLY: Final = "Hello! I can tell you a story, and I can answer questions about it."
_OFF_TOPIC: Final = (
    "What is the capital of France?", "Write a program.", "What is the meaning of life?", "Tell me a joke.",
    "What time is it?", "Explain how a car works.", "What is two plus two?", "Can you help me with my work?",
    "Translate this text.", "Who won the game?", "What is the weather today?", "Write a poem about the sea.",
    "How do I cook rice?", "Say this is a test", "Why is the sky blue?", "Count to ten.", "What is your name?",
)  # fmt: skip
_OFF_TOPIC_REPLY: Final = "I do not know. I only know little stories. Ask me to tell you one!"
_STORY_WISHES: Final = (
    "Tell me a story.", "Please tell me a story.", "Can you tell me a story?", "Write a short story.",
    "Tell me a short story.", "I want to hear a story.", "Tell me another story.", "Once upon a time?",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSegment:
    """A piece of a document. `question` is set if the piece is its answer."""

    text: str
    question: Question | None = None


Document = list[TextSegment]


def document(seed: str, index: int, *, beats: tuple[int, int] = (2, 8), drill: bool = False) -> Document:
    """Returns document `index` of the stream `seed`; the same arguments give the same document on any machine.

    `beats` is the least and the largest number of events in a story. A `drill` has only plain facts and many questions.
    """
    rng = random.Random(f"{seed}:{index}")
    if drill:
        return [*_drill(rng, beats), TextSegment(text=END_OF_TEXT)]
    style = rng.random()
    if style < 0.32:
        segments = _chat_about_story(rng, beats)
    elif style < 0.62:
        segments = _story_with_questions(rng, beats)
    elif style < 0.78:
        segments = _story_then_quiz(rng, beats)
    elif style < 0.96:
        segments = _chat_with_wish(rng, beats)
    else:
        segments = _small_talk(rng)
    return [*segments, TextSegment(text=END_OF_TEXT)]


def text_of(segments: Document) -> str:
    """Returns the text of a document."""
    return "".join(segment.text for segment in segments)


def replay(story: Story) -> Iterator[tuple[str, World]]:
    """Yields the opening, then each beat, with the world after it. The world is one object, which each step changes."""
    world = story.setting.copy()
    yield story.opening, world
    for beat in story.beats:
        world.apply(beat.event)
        yield beat.text, world


def questions(rng: random.Random, world: World, wanted: int) -> list[Question]:
    """Returns up to `wanted` different questions about the present `world`; harder kinds come more often.

    No two have both the same kind and the same subject; two kinds may ask about one thing.
    """
    left = subjects(world)
    chosen: list[Question] = []
    while left and len(chosen) < wanted:
        kinds = sorted({kind for kind, _ in left})
        (kind,) = rng.choices(kinds, [_WEIGHTS[kind] for kind in kinds])
        choice = rng.choice([item for item in left if item[0] is kind])
        left.remove(choice)
        chosen.append(ask(world, *choice, rng))
    return chosen


def _story(rng: random.Random, beats: tuple[int, int], *, plain: bool) -> Story:
    return tell(rng, beats=rng.randint(*beats), plain=plain)


def _turn(role: str, text: str, question: Question | None = None) -> Document:
    return [TextSegment(text=role), TextSegment(text=text + END_OF_TURN, question=question)]


def _system(rng: random.Random) -> Document:
    return _turn(SYSTEM, rng.choice(_SYSTEM_PROMPTS)) if rng.random() < 0.15 else []


def _chat_about_story(rng: random.Random, beats: tuple[int, int]) -> Document:
    """Returns a chat in which the user tells a story, at once or in parts, and asks; the assistant answers."""
    story = _story(rng, beats, plain=rng.random() < 0.5)
    parts = len(story.beats) + 1
    cuts = {parts - 1} | {rng.randrange(parts) for _ in range(rng.randint(0, 2))}
    joint = rng.choice((" ", " ", "\n"))
    out = _system(rng)
    sentences: list[str] = []
    for index, (text, world) in enumerate(replay(story)):
        sentences.append(text)
        if index not in cuts:
            continue
        batch = questions(rng, world, rng.randint(1, 3))
        for number, question in enumerate(batch):
            message = " ".join(sentences) + joint + question.text if number == 0 else question.text
            out += _turn(USER, message) + _turn(ASSISTANT, question.answer, question)
        sentences = []
    return out


def replay_texts(story: Story) -> list[str]:
    """Returns the opening and the text of each beat of a story."""
    return [story.opening, *(beat.text for beat in story.beats)]


def _story_with_questions(rng: random.Random, beats: tuple[int, int]) -> Document:
    """Returns running text with questions between the sentences, each followed by its answer."""
    story = _story(rng, beats, plain=rng.random() < 0.5)
    out: Document = []
    for text, world in replay(story):
        out.append(TextSegment(text=f" {text}" if out else text))
        if rng.random() < 0.45:
            for question in questions(rng, world, rng.choice((1, 1, 2))):
                out += [
                    TextSegment(text=f" {question.text}"),
                    TextSegment(text=f" {question.answer}", question=question),
                ]
    if rng.random() < 0.5:
        out.append(TextSegment(text=f" {story.ending}"))
    return out


def _drill(rng: random.Random, beats: tuple[int, int]) -> Document:
    """Returns plain facts with many questions: always after the last fact, sometimes between facts."""
    story = _story(rng, beats, plain=True)
    chat = rng.random() < 0.5
    out: Document = []
    message = ""
    for index, (text, world) in enumerate(replay(story)):
        message += f" {text}" if message or (out and not chat) else text
        if index < len(story.beats) and rng.random() < 0.6:
            continue
        for question in questions(rng, world, rng.randint(2, 7)):
            message += f" {question.text}" if message or not chat else question.text
            if chat:
                out += _turn(USER, message) + _turn(ASSISTANT, question.answer, question)
            else:
                out += [TextSegment(text=message), TextSegment(text=f" {question.answer}", question=question)]
            message = ""
    return out


def _story_then_quiz(rng: random.Random, beats: tuple[int, int]) -> Document:
    """Returns a whole story, in half of the cases followed by lines of questions and answers."""
    story = _story(rng, beats, plain=False)
    last = story.setting
    out: Document = []
    for text, world in replay(story):
        out.append(TextSegment(text=f" {text}" if out else text))
        last = world
    out.append(TextSegment(text=f" {story.ending}"))
    if rng.random() < 0.5:
        for question in questions(rng, last, rng.randint(2, 5)):
            out.append(TextSegment(text=f"\nQuestion: {question.text}\nAnswer:"))
            out.append(TextSegment(text=f" {question.answer}", question=question))
    return out


def _chat_with_wish(rng: random.Random, beats: tuple[int, int]) -> Document:
    """Returns a chat in which the user wishes for a story, may name a person or a thing in it, and asks about it."""
    story = _story(rng, beats, plain=False)
    wish = rng.choice(_STORY_WISHES)
    about = rng.random()
    verb = rng.choice(("Tell me a story about", "Write a story about", "Please tell me a story about"))
    if about < 0.25:
        wish = f"{verb} {story.people[0]}."
    elif about < 0.5:
        wish = f"{verb} {with_article(story.things[0])}."
    elif about < 0.75:
        wish = f"{verb} {story.people[0]} and {with_article(story.things[0])}."
    *_, (_, last) = replay(story)
    out = _system(rng) + _turn(USER, wish) + _turn(ASSISTANT, " ".join([*replay_texts(story), story.ending]))
    for question in questions(rng, last, rng.randint(0, 4)):
        out += _turn(USER, question.text) + _turn(ASSISTANT, question.answer, question)
    return out


def _small_talk(rng: random.Random) -> Document:
    """Returns a chat with a greeting, or with a question that the model cannot answer (one without a story too)."""
    out = _system(rng)
    style = rng.random()
    if style < 0.35:
        return out + _turn(USER, rng.choice(_GREETINGS)) + _turn(ASSISTANT, _GREETING_REPLY)
    question = rng.choice(_OFF_TOPIC)
    if style > 0.7:
        *_, (_, world) = replay(_story(rng, (1, 2), plain=True))
        question = questions(rng, world, 1)[0].text
    return out + _turn(USER, question) + _turn(ASSISTANT, _OFF_TOPIC_REPLY)
