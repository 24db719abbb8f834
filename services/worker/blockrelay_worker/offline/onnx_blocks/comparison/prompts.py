"""Made-up prompts: what the originals and the imported blocks are both asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Tokens of each step: a prompt and single tokens behind it, which the attention operator of onnxruntime-genai takes.
_STEPS = ((24, 1, 1), (5, 1))
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """`steps`: the new tokens of each step, one behind the other."""

    steps: tuple[Array, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Positions of each step, from and to."""
        return list(pairwise(accumulate((len(step) for step in self.steps), initial=0)))

    @property
    def length(self) -> int:
        return sum(map(len, self.steps))

    def request(self, step: int) -> dict[str, Array]:
        """What a graph may ask of a request: one row."""
        first, end = self.spans[step]
        return {
            "input_ids": self.steps[step][None],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(first, end)[None],
        }


def prompts(vocabulary: int, context: int) -> Sequence[Prompt]:
    """The same ones every time, of tokens below `vocabulary`; none is longer than `context`."""
    random = np.random.default_rng(15)
    found: list[Prompt] = []
    for steps in _STEPS:
        first = max(1, min(steps[0], context - len(steps) + 1))
        sizes = (first, *steps[1:])[: max(1, context)]
        found.append(Prompt(tuple(random.integers(0, vocabulary, size) for size in sizes)))
    return found
