"""What goes into a stage and what comes out: one ragged matrix of rows and the segments it is made of."""

from collections.abc import Mapping, Sequence
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
    `hidden` is copied, never written. A later stage of ONNX blocks that others made has `tokens` and, for each segment,
    `tensors`: of all of its rows at once, or of parts of them in order, which then add up to its rows.
    `wanted` are the row indexes whose logits are wanted, ascending; ignored by a stage without the last block. `needs`
    says of each of them how much of its row is needed (None: all of it); empty: whole rows.
    """

    segments: Sequence[Segment]
    tokens: NDArray[np.int32] | None = None
    hidden: NDArray[np.float32] | None = None
    tensors: Sequence[Sequence[NamedTensors]] = ()
    wanted: Sequence[int] = ()
    needs: Sequence[Need | None] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What one run of a stage gives.

    Exactly one of `hidden` float32 [R, H] (the stage does not hold the last block), `tensors` (nor does one of ONNX
    blocks that others made; for each segment, as in Batch), `logits` float32 [len(wanted), vocab] and `rows` is set.
    `rows` are what each wanted row needs, or all of it: by an executor that heeds `needs`, of a batch that has some.
    All are buffers of the executor: valid until its next `run`; copy what must last.
    `not_finite` are the indexes of the segments with a row that is NaN or infinite (fail these requests: their pages
    hold rubbish); the other segments are unaffected.
    `sessions` of ONNX blocks that others made are counted (`WarmCounts`); of others there is nothing.
    `seconds` is the wall time of each block of the stage by name (`block_3`); `estimated` where only the stage's was
    measured, and divided. Beside the blocks, `kv_s` is what it took to find the places of the rows in the KV pages
    (page tables and slots), and `moved_s` to bring rows in and results out: the copy into the stage's memory, or the
    way to the process of a device and back.
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
    """The first block whose output is not finite, and what each block up to it took, in order; it is the last one."""

    block: str
    seconds: Mapping[str, float]


def check_segments(segments: Sequence[Segment], *, limit: int, pages: int) -> int:
    """The number of rows. Raises ExecutionError unless positions lie below `limit` and pages in 0..`pages` - 1.

    `pages` 0 stands for a stage that keeps none: the segments' pages are then not looked at.
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
        raise ExecutionError("an empty batch")
    return count


def tokens_of(batch: Batch, count: int, model: ModelConfig) -> NDArray[np.int32]:
    """The batch's token ids, [count]. Raises ExecutionError unless they are that many of the vocabulary."""
    tokens = batch.tokens
    if tokens is None or tokens.shape != (count,):
        raise ExecutionError(f"this stage takes {count} token ids, one per row of the segments")
    if int(tokens.min()) < 0 or int(tokens.max()) >= model.vocab_size:
        raise ExecutionError(f"a token id is not in 0..{model.vocab_size - 1}")
    return tokens


def hidden_of(batch: Batch, count: int, model: ModelConfig) -> NDArray[np.float32]:
    """The batch's rows, [count, H]. Raises ExecutionError unless they are that many, of that width, in float32."""
    hidden, shape = batch.hidden, (count, model.hidden_size)
    if hidden is None or hidden.shape != shape or hidden.dtype != np.float32:
        raise ExecutionError(f"this stage takes float32 rows [{count}, {model.hidden_size}]")
    return hidden


def tensors_of(batch: Batch) -> Sequence[Sequence[NamedTensors]]:
    """The batch's tensors by name. Raises ExecutionError unless the parts of each segment are its rows."""
    rows = [segment.rows for segment in batch.segments]
    given = [sum(part.rows for part in parts) for parts in batch.tensors]
    if given != rows:
        raise ExecutionError(f"this stage takes tensors by name of {rows!r:.60} rows, and was given {given!r:.60}")
    return batch.tensors
