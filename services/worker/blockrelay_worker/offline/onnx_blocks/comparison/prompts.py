"""Made-up prompts on which both the originals and the imported blocks run."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Tokens of each step: a prompt, then single tokens, as the attention operator of onnxruntime-genai requires.
_STEPS = ((24, 1, 1), (5, 1))
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepPrompt:
    """A prompt that is computed in several steps."""

    steps: tuple[Array, ...]
    """The new tokens of each step, int64 [tokens]."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Positions of each step: its first one, and the one after its last."""
        return list(pairwise(accumulate((len(step) for step in self.steps), initial=0)))

    @property
    def length(self) -> int:
        """Number of tokens of all steps together."""
        return sum(map(len, self.steps))

    def request(self, step: int) -> dict[str, Array]:
        """The input tensors of a request for step `step` (from 0), in a batch of one, by name.

        All are int64: `input_ids` and `position_ids` [1, new tokens], `attention_mask` [1, all tokens so far].
        """
        first, end = self.spans[step]
        return {
            "input_ids": self.steps[step][None],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(first, end)[None],
        }


def prompts(vocabulary: int, context: int) -> Sequence[StepPrompt]:
    """The prompts: always the same ones, with tokens below `vocabulary`.

    None is longer than `context` tokens, which must be at least 1.
    """
    random = np.random.default_rng(15)
    result: list[StepPrompt] = []
    for steps in _STEPS:
        first = max(1, min(steps[0], context - len(steps) + 1))
        sizes = (first, *steps[1:])[: max(1, context)]
        result.append(StepPrompt(tuple(random.integers(0, vocabulary, size) for size in sizes)))
    return result
