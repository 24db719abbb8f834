"""Rows of one run on their way through one batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """Consecutive rows of `run` from `position` on, one per token.

    `hidden` float32 [rows, H] from the stage before, None in the first stage. `samples`: the last row is the last known
    token, so the last stage chooses the next token (or ends the tensor step) there.
    """

    run: Run
    position: int
    tokens: Sequence[int]
    hidden: NDArray[np.float32] | None = None
    samples: bool

    @property
    def rows(self) -> int:
        return len(self.tokens)

    def wanted_rows(self) -> list[int]:
        """Rows, relative to the first, whose logits the last stage needs; ascending."""
        rows = [i for i in range(self.rows) if self.run.wants_logits(self.position + i)]
        if self.samples and (not rows or rows[-1] != self.rows - 1):
            rows.append(self.rows - 1)
        return rows
