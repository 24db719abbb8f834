"""The words of the stories. Every list is fixed, so that the generator depends on nothing but its seed."""

from dataclasses import dataclass
from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in the world. All places take "in", so that no answer depends on a preposition."""

    name: str

    def phrase(self) -> str:
        """Returns the place for a sentence, such as "in the garden"."""
        return f"in the {self.name}"


GIRLS: Final = _words(
    "Mia Anna Lily Emma Sara Nora Lucy Ella Zoe Ruby Rosa Clara Alice Eva Julia Molly Nina Amy Daisy "
    "Grace Hannah Kate Mary Sophie"
)
BOYS: Final = _words(
    "Tom Ben Max Leo Sam Jack Noah Finn Oscar Paul Peter Hugo Felix Adam Luke David Henry "
    "Jacob Mark Nick Oliver Simon Theo Tim"
)
#: Parts of made-up names. With them the model cannot memorise all names, and learns to copy any name.
NAME_STARTS: Final = _words("Ba Bo Da De Do Fa Fi Ga Ha Ja Ka Ki La Lo Ma Mi Na No Pa Ra Ri Sa Ta To Va Wi Za Zu")
NAME_MIDDLES: Final = _words("bi da la li ma mo na ni ra ri ro sa ta ti vi za")
NAME_ENDS: Final = _words("n r l s x m k ra lo na ko ly mi to do ne")

THINGS: Final = _words(
    "ball book kite hat doll drum cup key lamp map pen ring rope spoon bell brush candle coat coin flag hammer "
    "mirror pillow scarf shell shoe stone sword toy boat umbrella watch blanket camera crown letter"
)
COLOURS: Final = _words("red blue green yellow white black brown pink golden silver")
PLACES: Final = tuple(
    Place(name=name)
    for name in _words(
        "kitchen garden park forest barn house cave school shop tower hall castle tent library field meadow village "
        "cellar stable tunnel"
    )
)
#: Countable food: (singular, plural).
FOODS: Final = (
    *((one, f"{one}s") for one in _words("apple pear plum nut cake egg carrot lemon banana")),
    ("berry", "berries"),
    ("peach", "peaches"),
)
#: Containers that hold food, without the article that `World.counts` has before them ("the basket").
HOLDERS: Final = ("basket", "bowl", "bag", "jar", "box", "sack")
NUMBERS: Final = _words("zero one two three four five six seven eight nine ten eleven twelve")
#: The largest count that any story reaches.
MOST: Final = len(NUMBERS) - 1

WEATHERS: Final = (
    "The sun was shining", "It was a warm day", "It was raining", "The wind was blowing", "The sky was blue",
    "It was a cold morning", "The birds were singing", "It was a quiet day", "Snow was falling", "It was a bright day",
)  # fmt: skip
TIMES: Final = (
    "One day",
    "One morning",
    "One sunny day",
    "One afternoon",
    "One summer day",
    "One evening",
    "One winter day",
)
TRAITS: Final = (
    "kind",
    "brave",
    "clever",
    "funny",
    "quiet",
    "cheerful",
    "curious",
    "gentle",
    "shy",
    "busy",
    "little",
    "happy",
)
HOBBIES: Final = (
    "sing", "dance", "read books", "climb trees", "play games", "tell jokes", "look at the stars", "help others",
    "run fast", "paint pictures", "make things", "watch the clouds", "listen to stories", "swim",
)  # fmt: skip
ANIMALS: Final = ("dog", "cat", "bird", "rabbit", "mouse", "frog", "horse", "fox", "duck", "squirrel")
