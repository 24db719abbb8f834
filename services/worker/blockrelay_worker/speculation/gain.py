"""The gain that guesses should bring, from measured costs and the share of right ones. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from blockrelay.protocol.constants import MAX_DRAFTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What guesses cost, each as a share of a step without guesses."""

    call: float
    """Share of one call of the draft model, which makes a guess for every run."""
    steps: Mapping[int, float] = field(default_factory=dict[int, float])
    """Share of a step that verifies this number of guesses of every run, 1 or more; 1.0 where there is no entry."""


def tokens_a_step(right: float, guesses: int) -> float:
    """Tokens that a step is expected to give a run, if each guess behind right ones is right with this probability."""
    if right >= 1:
        return guesses + 1.0
    return (1 - right ** (guesses + 1)) / (1 - right)


def expected_gain(right: float, guesses: int, prices: Prices) -> float:
    """Returns the expected pace of tokens with guesses as a multiple of that without; `right` is from 0 to 1."""
    return tokens_a_step(right, guesses) / (prices.steps.get(guesses, 1.0) + guesses * prices.call)


def best_count(right: float, prices: Prices, most: int = MAX_DRAFTS) -> int:
    """Returns the number of guesses, 1 to `most`, with the largest expected gain; the smallest number of equal ones."""
    return max(range(1, max(1, most) + 1), key=lambda guesses: (expected_gain(right, guesses, prices), -guesses))
