"""The part of one run in a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.batch import NamedTensors
from blockrelay_worker.runs.run import Run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """Consecutive rows of `run` from `position` on, one per token, that go into one batch."""

    run: Run
    position: int
    tokens: Sequence[int]
    hidden: NDArray[np.float32] | None = None
    """Rows from the stage before, float32 [rows, H]; None in the first stage and with `tensors`."""
    tensors: Sequence[NamedTensors] = ()
    """Named tensors from the stage before, instead of `hidden`, between ONNX blocks of other makers."""
    samples: bool
    """The last known token is among the rows: the last stage chooses the next token, or ends the tensor step."""
    drafts: int = 0
    """Number of draft tokens at the end, behind the last known token; 0 with `tensors`, which cannot be cut."""

    @property
    def rows(self) -> int:
        """Number of rows, those of drafts included."""
        return len(self.tokens)

    @property
    def known_end(self) -> int:
        """The position after the last known token, drafts excluded."""
        return self.position + len(self.tokens) - self.drafts

    @property
    def decodes(self) -> bool:
        """True if it decodes: one known token, perhaps with drafts behind it."""
        return self.samples and len(self.tokens) == 1 + self.drafts

    def without_drafts(self) -> "Work":
        """The same rows without those of drafts."""
        known = self.rows - self.drafts
        hidden = None if self.hidden is None else self.hidden[:known]
        return replace(self, tokens=self.tokens[:known], hidden=hidden, drafts=0)
