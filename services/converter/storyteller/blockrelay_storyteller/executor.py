"""Computes the logits of a block folder with the worker's executor, in process."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import open_block_folder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.loader import executors_for
from blockrelay_worker.execution.page_layout import pages_for


def executor_logits(root: Path, threads: int) -> Callable[[list[int]], NDArray[np.float32]]:
    """Returns a function from token ids to logits, float32 [ids, vocab].

    `root` is a converted model, not ONNX blocks made by others, and `threads` the CPU threads of its kernels. All ids
    run as one chunk; in exact precisions the bits are those of any other chunking. The function takes one id to as many
    as the model's context has tokens. It takes one call at a time, because all calls use the same KV pages. A call may
    overwrite the logits of the call before: copy what must last. Raises BlockFolderError for a folder that cannot be
    used, and ExecutionError if its blocks cannot be computed. The function raises ExecutionError for too few or too
    many ids, for an id outside the vocabulary, and for a block that fails.
    """
    folder = open_block_folder(root)
    limit = folder.rotary()[0].shape[0]
    blocks = folder.model.blocks
    executor = executors_for(folder, threads=threads).load(folder, 1, blocks, pages=pages_for(limit))
    pages = executor.pool.allocate(pages_for(limit))

    def logits_of(ids: list[int]) -> NDArray[np.float32]:
        segment = Segment(rows=len(ids), first_position=0, pages=pages)
        tokens = np.array(ids, np.int32)
        output = executor.run(Batch(segments=[segment], tokens=tokens, wanted=range(len(ids))))
        assert output.logits is not None, "a stage with all blocks gives logits"
        return output.logits

    return logits_of
