"""Input and output of one step of a stage: one ragged matrix of rows (tokens) and the segments it is made of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig
from blockrelay.errors import ExecutionError
from blockrelay.protocol.encoding.named_tensors import NamedTensors
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.execution.selection import LogitRow, Need
from blockrelay_worker.kernels.specification import PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive positions of one request, one row of the batch each.

    The rows are the positions `first_position .. first_position + rows - 1`. `pages` are the ids of the request's KV
    pages in this stage, from position 0 on. They must cover the last row's position, and the positions before
    `first_position` must have been run through this stage into the same pages. More pages than needed are fine.
    A batch has at most one segment of a request. Positions that were run before are overwritten (rejected drafts,
    retries).
    """

    rows: int
    first_position: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The input of one step: R rows in the order of `segments`, whose `rows` add up to R >= 1.

    `tokens` int32 [R] are set where the stage has block 1, else `hidden` float32 [R, H], which is copied and never
    written. A later stage of a model served as its own ONNX files has both `tokens` and, for each segment, `tensors`:
    one for all of its rows, or several in order whose rows add up to the segment's.
    `wanted` are the indexes of the rows whose logits are returned, ascending; a stage without the last block ignores
    them. `needs` has an entry for each of them: which logits suffice (None: all); when empty, all rows are whole.
    """

    segments: Sequence[Segment]
    tokens: NDArray[np.int32] | None = None
    hidden: NDArray[np.float32] | None = None
    tensors: Sequence[Sequence[NamedTensors]] = ()
    wanted: Sequence[int] = ()
    needs: Sequence[Need | None] = ()

    def segments_with(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Returns the indexes of the segments that have these rows of the batch, ascending."""
        ends = np.cumsum([segment.rows for segment in self.segments])
        return tuple(sorted({int(np.searchsorted(ends, row, side="right")) for row in rows}))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """The output of one step of a stage.

    Exactly one of four results is set. A stage without the last block gives `hidden` float32 [R, H] or, for a model
    served as its own ONNX files, `tensors` for each segment as in Batch. A stage with the last block gives `logits`
    float32 [len(wanted), vocab], or `rows`: for each wanted row the logits that its Need asks for, or the whole row.
    Only executors that heed `needs` give `rows`. All are buffers of the executor, valid until its next `run`: copy
    what must last.
    `not_finite` are the indexes of the segments with a row that is NaN or infinite (fail these requests: their pages
    hold garbage); the other segments are unaffected.
    `sessions` are the counts of warm ONNX sessions (`WarmCounts`); empty where the model is not served as ONNX files.
    `seconds` is the wall time of each block of the stage by name (`block_3`). With `estimated`, only the stage was
    measured, and its time divided among the blocks. `kv_s` is the time to map rows to KV pages (page tables and
    slots). `moved_s` is the time to move rows in and results out: the copy into the stage's memory, or the way to the
    process of a device and back. Neither is part of `seconds`.
    """

    hidden: NDArray[np.float32] | None = None
    tensors: Sequence[Sequence[NamedTensors]] | None = None
    logits: NDArray[np.float32] | None = None
    rows: Sequence[LogitRow] | None = None
    not_finite: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    estimated: bool = False
    kv_s: float = 0.0
    moved_s: float = 0.0
    sessions: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFault:
    """The first block whose output is not finite. `seconds` are the wall times of the blocks up to and including it."""

    block: str
    seconds: Mapping[str, float]


def check_segments(segments: Sequence[Segment], *, limit: int, pages: int) -> int:
    """Checks segments and returns their number of rows.

    Raises ExecutionError unless there is a segment and each has a row, positions in 0..`limit` - 1, and pages up to its
    last position with ids in 0..`pages` - 1. With `pages` 0, for a stage without KV, pages are not checked.
    """
    for index, segment in enumerate(segments):
        end = segment.first_position + segment.rows
        if segment.rows < 1 or segment.first_position < 0 or end > limit:
            raise ExecutionError(f"segment {index}: positions {segment.first_position}..{end - 1} of {limit}")
        if not pages:
            continue
        needed = segment.pages[: pages_for(end)]
        if len(needed) * PAGE < end:
            raise ExecutionError(f"segment {index}: {len(needed)} pages do not reach position {end - 1}")
        if min(needed) < 0 or max(needed) >= pages:
            raise ExecutionError(f"segment {index}: a page id is not in 0..{pages - 1}")
    count = sum(segment.rows for segment in segments)
    if not count:
        raise ExecutionError("the batch has no rows")
    return count


def tokens_of(batch: Batch, count: int, model: ModelConfig) -> NDArray[np.int32]:
    """Returns the batch's token ids, int32 [count]. Raises ExecutionError for none, another number or an unknown id."""
    tokens = batch.tokens
    if tokens is None or tokens.shape != (count,):
        raise ExecutionError(f"this stage takes {count} token ids, one per row of the segments")
    if int(tokens.min()) < 0 or int(tokens.max()) >= model.vocab_size:
        raise ExecutionError(f"a token id is not in 0..{model.vocab_size - 1}")
    return tokens


def hidden_of(batch: Batch, count: int, model: ModelConfig) -> NDArray[np.float32]:
    """Returns the batch's hidden states, float32 [count, H]. Raises ExecutionError for none, another shape or dtype."""
    hidden, shape = batch.hidden, (count, model.hidden_size)
    if hidden is None or hidden.shape != shape or hidden.dtype != np.float32:
        raise ExecutionError(f"this stage takes float32 rows [{count}, {model.hidden_size}]")
    return hidden


def tensors_of(batch: Batch) -> Sequence[Sequence[NamedTensors]]:
    """Returns the batch's named tensors of each segment. Raises ExecutionError unless their rows are the segment's."""
    rows = [segment.rows for segment in batch.segments]
    given = [sum(part.rows for part in parts) for parts in batch.tensors]
    if given != rows:
        raise ExecutionError(f"this stage takes named tensors with {rows!r:.60} rows, and got {given!r:.60}")
    return batch.tensors
