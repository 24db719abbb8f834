"""Stages of a block folder that hand on tensors by name, as those of ONNX blocks that others made do."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.batch import Batch, BlockFault, NamedTensors, StageOutput, tensors_of
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fault_injection import WrappingExecutor

#: A mask with a column for each position so far, in a dtype of its own.
HIDDEN, MASK = "hidden", "mask"


class HandingOn(WrappingExecutor):
    """Takes tokens in every stage, and between them what its blocks compute under a name, beside a mask.

    Rows of a segment that goes on behind others are handed on one by one with `one_by_one`. What it gave is spoiled at
    its next run, as buffers of an executor may be.
    """

    def __init__(self, executor: Executor, *, one_by_one: bool = False) -> None:
        super().__init__(executor)
        self._one_by_one = one_by_one
        self._given: list[NDArray[np.float32]] = []
        self.seen: list[Batch] = []

    def run(self, batch: Batch) -> StageOutput:
        for array in self._given:
            array.fill(np.nan)
        self.seen.append(batch)
        output = super().run(self._plain(batch))
        if output.hidden is None:
            return output
        self._given = [output.hidden.copy()]
        return replace(output, hidden=None, tensors=self._named(batch, self._given[0]))

    def first_not_finite(self, batch: Batch) -> BlockFault | None:
        return super().first_not_finite(self._plain(batch))

    def _plain(self, batch: Batch) -> Batch:
        """As the blocks of a folder take it."""
        assert batch.tokens is not None and batch.hidden is None
        if self.takes_tokens:
            assert not batch.tensors
            return batch
        parts = [part for segment in tensors_of(batch) for part in segment]
        for segment, own in zip(batch.segments, batch.tensors, strict=True):
            ends = segment.first_position + np.cumsum([part.rows for part in own])
            assert [part.arrays[MASK].shape for part in own] == [
                (1, 1, part.rows, end) for part, end in zip(own, ends, strict=True)
            ]
        hidden = np.concatenate([part.arrays[HIDDEN][0] for part in parts])
        return replace(batch, tokens=None, tensors=(), hidden=hidden)

    def _named(self, batch: Batch, hidden: NDArray[np.float32]) -> Sequence[Sequence[NamedTensors]]:
        at, found = 0, list[list[NamedTensors]]()
        for segment in batch.segments:
            each = 1 if self._one_by_one and segment.first_position else segment.rows
            begins = range(0, segment.rows, each)
            found.append([
                NamedTensors(
                    rows=each,
                    arrays={
                        HIDDEN: hidden[np.newaxis, at + begin : at + begin + each],
                        MASK: np.ones((1, 1, each, segment.first_position + begin + each), np.bool_),
                    },
                )
                for begin in begins
            ])  # fmt: skip
            at += segment.rows
        return found
