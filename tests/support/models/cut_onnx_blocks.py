"""ONNX blocks that others made, as stages one behind the other in one process, without an engine between them."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, NamedTensors, Segment, StageOutput
from blockrelay_worker.execution.onnx.as_is.loading import AsIsExecutors
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage

Row = tuple[Sequence[int], int, Sequence[int]]
"""Tokens of a request, how many there are before them, and its pages."""


def cut(executors: AsIsExecutors, folder: BlockFolder, ends: Sequence[int], *, pages: int = 64) -> list[AsIsStage]:
    """Stages that end with these blocks; the last one is the model's last."""
    return [executors.loaded(folder, first + 1, last, pages=pages)[0] for first, last in pairwise((0, *ends))]


def batch_of(rows: Sequence[Row], tensors: Sequence[Sequence[NamedTensors]] = (), *, all_wanted: bool = False) -> Batch:
    """The last logits of each are wanted, or all."""
    ends = np.cumsum([len(tokens) for tokens, _, _ in rows])
    return Batch(
        segments=[Segment(rows=len(tokens), first_position=past, pages=pages) for tokens, past, pages in rows],
        tokens=np.concatenate([np.array(tokens, np.int32) for tokens, _, _ in rows]),
        tensors=tensors,
        wanted=range(int(ends[-1])) if all_wanted else [int(end) - 1 for end in ends],
    )


def run(stages: Sequence[AsIsStage], rows: Sequence[Row], *, all_wanted: bool = False) -> NDArray[np.float32]:
    """The logits behind the last stage."""
    tensors: Sequence[Sequence[NamedTensors]] = ()
    output: StageOutput | None = None
    for stage in stages:
        output = stage.run(batch_of(rows, tensors, all_wanted=all_wanted))
        assert output.not_finite == ()
        tensors = output.tensors or ()
    assert output is not None and output.logits is not None
    return output.logits
