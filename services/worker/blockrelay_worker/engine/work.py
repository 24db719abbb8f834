"""Rows of one run on their way through one batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.engine.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """Consecutive rows of `run` from `position` on, one per token.

    `hidden` float32 [rows, H] from the stage before, None in the first stage. `samples`: the last known token is among
    them, so the last stage chooses the next token (or ends the tensor step) there. Behind it stand `drafts` rows of
    guessed tokens.
    """

    run: Run
    position: int
    tokens: Sequence[int]
    hidden: NDArray[np.float32] | None = None
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
    def alone(self) -> bool:
        """To be computed without neighbours, and announced: the death of the worker is then its own fault."""
        return self.position < self.run.alone_until

    @property
    def decodes(self) -> bool:
        """It continues a running request: one known row, perhaps with drafts."""
        return self.samples and len(self.tokens) == 1 + self.drafts

    def without_drafts(self) -> "Work":
        known = self.rows - self.drafts
        hidden = None if self.hidden is None else self.hidden[:known]
        return replace(self, tokens=self.tokens[:known], hidden=hidden, drafts=0)

    def wanted_rows(self) -> Sequence[int]:
        """Rows, relative to the first, whose logits the last stage needs; ascending."""
        known = self.rows - self.drafts
        if self.run.body.logits != "all":
            return range(known - 1, self.rows) if self.samples else ()
        rows = [i for i in range(known) if self.run.wants_logits(self.position + i)]
        if self.samples and (not rows or rows[-1] != known - 1):
            rows.append(known - 1)
        return rows
