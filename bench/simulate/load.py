"""What clients ask for, when requests come and how long they are; and what they saw of it. Data, and draws from it."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, drawn evenly from `least` to `most`."""

    least: int
    most: int

    @classmethod
    def of(cls, tokens: int) -> "Lengths":
        """Always so many."""
        return cls(tokens, tokens)

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    def draw(self, chance: random.Random) -> int:
        return chance.randint(self.least, self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Either `clients`, each of whom sends its next request when the last is answered, or requests that come at random
    (a Poisson process), `per_second` of them."""

    prompt: Lengths
    new: Lengths
    clients: int = 0
    per_second: float = 0.0

    def __post_init__(self) -> None:
        assert bool(self.clients) != bool(self.per_second), "either clients or a rate"

    def arrivals(self, chance: random.Random, until: float) -> Iterator[float]:
        """When requests come that wait for nobody, in order; none where clients wait for their answers."""
        now = 0.0
        while self.per_second and (now := now + chance.expovariate(self.per_second)) < until:
            yield now


@dataclass(slots=True, eq=False)
class Asked:
    """One request. Seconds of one clock: when it was `sent`, and when each of its `tokens` reached its client."""

    prompt: int
    new: int
    sent: float
    tokens: list[float] = field(default_factory=list[float])
    #: Tokens that the simulated cell has committed, or is about to.
    committed: int = 0

    @property
    def first_token_s(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def between_tokens_s(self) -> float:
        """The mean; 0 for a request of one token."""
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Figures:
    """Tokens per second of a time, and of the requests that began and ended in it the mean times in seconds."""

    tokens_per_second: float
    first_token_s: float
    between_tokens_s: float


def mean(several: Sequence[Figures]) -> Figures:
    """Of each figure."""
    names = [field.name for field in fields(Figures)]
    return Figures(*(fmean(getattr(one, name) for one in several) for name in names))


def figures(every: Sequence[Asked], begin: float, end: float) -> Figures:
    """Of what came from `begin` to `end`."""
    ended = [one for one in every if one.sent >= begin and len(one.tokens) == one.new and one.tokens[-1] < end]
    tokens = sum(begin <= moment < end for one in every for moment in one.tokens)
    return Figures(
        tokens / (end - begin),
        fmean([one.first_token_s for one in ended] or [0.0]),
        fmean([one.between_tokens_s for one in ended if one.new > 1] or [0.0]),
    )
