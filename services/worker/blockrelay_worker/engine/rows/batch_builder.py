"""Builds the batch that a stage computes from the rows of runs, and splits its output between them. Pure."""

from collections.abc import Sequence
from typing import TypeVar, cast

import numpy as np

from blockrelay.errors import ExecutionError
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.selection import LogitRows, Need
from blockrelay_worker.sampling.sampler import need_of
from blockrelay_worker.scheduling.work import Work

Rows = TypeVar("Rows", bound=LogitRows)


def batch_of(work: Sequence[Work], role: StageRole) -> Batch:
    """The batch with the rows of `work`, in its order, and with the logits that the last stage wants.

    Raises ExecutionError if the stage before sent hidden rows to a stage of named tensors, or the reverse.
    """
    segments = [Segment(rows=w.rows, first_position=w.position, pages=w.run.pages) for w in work]
    wanted, needs = list[int](), list[Need | None]()
    at = 0
    for item in work:
        if role.last_stage:
            rows = wanted_rows(item)
            wanted += [at + i for i in rows]
            needs += [need_of(item.run.params) if item.run.body.logits == "none" else None] * len(rows)
        at += item.rows
    if not role.first_stage and any((w.hidden is None) != role.named_tensors for w in work):
        raise ExecutionError("rows came for ONNX blocks that others made, or tensors for a stage of a block folder")
    if role.first_stage or role.named_tensors:
        tokens = np.array([token for w in work for token in w.tokens], np.int32)
        tensors = [] if role.first_stage else [w.tensors for w in work]
        return Batch(segments=segments, tokens=tokens, tensors=tensors, wanted=wanted, needs=needs)
    hidden = np.concatenate([w.hidden for w in work if w.hidden is not None])
    return Batch(segments=segments, hidden=hidden, wanted=wanted, needs=needs)


def wanted_rows(work: Work) -> Sequence[int]:
    """Indexes of the rows, from the first row of `work`, whose logits the last stage needs; ascending."""
    known = work.rows - work.drafts
    if work.run.body.logits != "all":
        return range(known - 1, work.rows) if work.samples else ()
    rows = [i for i in range(known) if work.run.wants_logits(work.position + i)]
    if work.samples and (not rows or rows[-1] != known - 1):
        rows.append(known - 1)
    return rows


def split(work: list[Work], rows: Rows, counts: list[int]) -> list[tuple[Work, Rows]]:
    """Cuts `rows` into consecutive parts of `counts` rows, one per Work (views)."""
    ends = np.cumsum(counts).tolist()
    return [(w, cast(Rows, rows[end - count : end])) for w, end, count in zip(work, ends, counts, strict=True)]
