"""The load of clients (when requests come, and how long they are), and the figures that clients see. Pure."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Lengths:
    """A uniform distribution of numbers of tokens, from `least` to `most`."""

    least: int
    most: int

    @classmethod
    def of(cls, tokens: int) -> "Lengths":
        """Returns the distribution that always gives `tokens`."""
        return cls(tokens, tokens)

    @property
    def mean(self) -> float:
        """The mean number of tokens."""
        return (self.least + self.most) / 2

    def draw(self, chance: random.Random) -> int:
        """Draws a number of tokens."""
        return chance.randint(self.least, self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load: either of clients that wait for their answers, or of requests that come at random.

    Exactly one of `clients` and `per_second` is not 0.
    """

    prompt: Lengths
    new: Lengths
    """The lengths of answers."""
    clients: int = 0
    """Clients, each of which sends its next request when the last is answered."""
    per_second: float = 0.0
    """The rate of requests that come at random (a Poisson process)."""

    def __post_init__(self) -> None:
        assert bool(self.clients) != bool(self.per_second), "either clients or a rate"

    def arrivals(self, chance: random.Random, until: float) -> Iterator[float]:
        """Yields the times of random requests in order, up to `until`; none for a load of clients."""
        now = 0.0
        while self.per_second and (now := now + chance.expovariate(self.per_second)) < until:
            yield now


@dataclass(slots=True, eq=False)
class ClientRequest:
    """One request and its progress. All times are seconds of one clock."""

    prompt: int
    """Tokens of the prompt."""
    new: int
    """Tokens of the answer."""
    sent: float
    """The time at which the client sent it."""
    tokens: list[float] = field(default_factory=list[float])
    """The time at which each token reached the client."""
    committed: int = 0
    """Tokens that the simulated cell has committed, or is about to."""

    @property
    def first_token_s(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.tokens[0] - self.sent

    @property
    def between_tokens_s(self) -> float:
        """Mean seconds between two tokens; 0 for a request of one token."""
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a period as clients see them; times are means over the requests that began and ended in it."""

    tokens_per_second: float
    first_token_s: float
    between_tokens_s: float


def mean(several: Sequence[Figures]) -> Figures:
    """Returns the mean of each figure."""
    names = [field.name for field in fields(Figures)]
    return Figures(*(fmean(getattr(one, name) for one in several) for name in names))


def figures(every: Sequence[ClientRequest], begin: float, end: float) -> Figures:
    """Returns the figures of the period from `begin` to `end`, of the requests `every` (also those of other times)."""
    ended = [one for one in every if one.sent >= begin and len(one.tokens) == one.new and one.tokens[-1] < end]
    tokens = sum(begin <= moment < end for one in every for moment in one.tokens)
    return Figures(
        tokens / (end - begin),
        fmean([one.first_token_s for one in ended] or [0.0]),
        fmean([one.between_tokens_s for one in ended if one.new > 1] or [0.0]),
    )
