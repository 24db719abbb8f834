"""What goes into a stage and what comes out: one ragged matrix of rows and the segments it is made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive rows of one request.

    The rows are the positions `first_position .. first_position + rows - 1`. `pages` are this stage's page ids of the
    request from position 0 on; they must cover the last row's position, and the positions before `first_position`
    must have been run through this stage into the same pages. More pages than needed are fine.
    A request may appear once in a batch. A first position below what was run before simply overwrites (rejected
    drafts, retries).
    """

    rows: int
    first_position: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """R rows in the order of `segments`, whose `rows` add up to R >= 1.

    Exactly one input: `tokens` int32 [R] (the stage holds block 1) or `hidden` float32 [R, H] (it does not).
    `hidden` is copied, never written.
    `wanted` are the row indexes whose logits are wanted, ascending; ignored by a stage without the last block.
    """

    segments: Sequence[Segment]
    tokens: NDArray[np.int32] | None = None
    hidden: NDArray[np.float32] | None = None
    wanted: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What one run of a stage gives.

    Exactly one of `hidden` float32 [R, H] (the stage does not hold the last block) and `logits` float32
    [len(wanted), vocab] is set. Both are buffers of the executor: valid until its next `run`; copy what must last.
    `not_finite` are the indexes of the segments with a row that is NaN or infinite (fail these requests: their pages
    hold rubbish); the other segments are unaffected.
    `seconds` is the wall time of each block of the stage by name (`block_3`).
    """

    hidden: NDArray[np.float32] | None = None
    logits: NDArray[np.float32] | None = None
    not_finite: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict[str, float])
