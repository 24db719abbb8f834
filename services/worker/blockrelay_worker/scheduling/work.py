"""Rows of one run on their way through one batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.batch import NamedTensors

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work(Generic[R]):
    """Consecutive rows of `run` from `position` on, one per token.

    From the stage before come `hidden` float32 [rows, H], or `tensors` by name where the blocks are ONNX blocks that
    others made; neither in the first stage. `samples`: the last known token is among them, so the last stage chooses
    the next token (or ends the tensor step) there. Behind it stand `drafts` rows of guessed tokens; none where
    `tensors` come, which cannot be cut.
    """

    run: R
    position: int
    tokens: Sequence[int]
    hidden: NDArray[np.float32] | None = None
    tensors: Sequence[NamedTensors] = ()
    samples: bool
    drafts: int = 0

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def known_end(self) -> int:
        """The position behind the last row whose token is known."""
        return self.position + len(self.tokens) - self.drafts

    @property
    def decodes(self) -> bool:
        """It continues a running request: one known row, perhaps with drafts."""
        return self.samples and len(self.tokens) == 1 + self.drafts

    def without_drafts(self) -> "Work[R]":
        known = self.rows - self.drafts
        hidden = None if self.hidden is None else self.hidden[:known]
        return replace(self, tokens=self.tokens[:known], hidden=hidden, drafts=0)
