"""What clients ask for: when requests come, and how long they are. Data, and draws from it."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, drawn evenly from `least` to `most`."""

    least: int
    most: int

    @classmethod
    def of(cls, tokens: int) -> "Lengths":
        """Always so many."""
        return cls(tokens, tokens)

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


@dataclass(slots=True)
class Asked:
    """One request. Seconds of the simulation: when it was `sent`, and when each of its `tokens` reached its client."""

    prompt: int
    new: int
    sent: float
    tokens: list[float] = field(default_factory=list[float])

    @property
    def first_token_s(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def between_tokens_s(self) -> float:
        """The mean; 0 for a request of one token."""
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)
