"""Builds the batch that a stage computes from the rows of runs, and splits its output between them. Pure."""

from collections.abc import Sequence
from typing import TypeVar, cast

import numpy as np

from blockrelay.errors import ExecutionError
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.selection import LogitRows, Need
from blockrelay_worker.policy import SCORED_ROWS
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
            rows, scored = wanted_rows(item), len(scored_rows(item))
            wanted += [at + i for i in rows]
            need = need_of(item.run.params) if item.run.body.logits == "none" else None
            needs += [None] * scored + [need] * (len(rows) - scored)
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
        drawn = range(known - 1, work.rows) if work.samples else ()
        return [*scored, *drawn] if (scored := scored_rows(work)) else drawn
    rows = [i for i in range(known) if work.run.wants_logits(work.position + i)]
    if work.samples and (not rows or rows[-1] != known - 1):
        rows.append(known - 1)
    return rows


def scored_rows(work: Work) -> Sequence[int]:
    """Indexes of the rows, from the first row of `work`, whose logits score the next token of the prompt; ascending.

    They are the first of `wanted_rows`. Empty for a request that does not ask for log probabilities of its prompt.
    """
    scores = None if work.run.last is None else work.run.last.scores
    return () if scores is None else scores.wanted(work.position, work.rows - work.drafts)


def within_logits(work: list[Work]) -> list[list[Work]]:
    """Splits `work`, in its order, so that each batch scores SCORED_ROWS rows at most; a part of a run is not cut."""
    batches, room = [list[Work]()], SCORED_ROWS
    for item in work:
        scored = len(scored_rows(item))
        if scored > room and batches[-1]:
            batches.append([])
            room = SCORED_ROWS
        batches[-1].append(item)
        room -= scored
    return batches


def split(work: list[Work], rows: Rows, counts: list[int]) -> list[tuple[Work, Rows]]:
    """Cuts `rows` into consecutive parts of `counts` rows, one per Work (views)."""
    ends = np.cumsum(counts).tolist()
    return [(w, cast(Rows, rows[end - count : end])) for w, end, count in zip(work, ends, counts, strict=True)]
