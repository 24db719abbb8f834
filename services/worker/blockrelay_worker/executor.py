"""Runs one stage, consecutive blocks of a model, on ragged batches (DESIGN section 3)."""

from blockrelay.block_folder import BlockFolder
from blockrelay_worker.batch import Batch, StageOutput
from blockrelay_worker.kernels.interface import Kernels
from blockrelay_worker.pages import PageLayout, PagePool


class StageExecutor:
    """Blocks `first_block..last_block` (numbered from 1, both included) of one block folder, in this process.

    Loading checks nothing but shapes: call `known_answers.verify` before serving. `run` writes the pages that the
    segments name and no other; it is not thread-safe, nor is the pool.
    """

    def __init__(
        self, folder: BlockFolder, first_block: int, last_block: int, *, pool: PagePool, threads: int, kernels: Kernels
    ) -> None:
        """`folder` comes from `open_block_folder`; `pool` has the layout `layout_of(...)`; `threads` >= 1.

        Raises BlockFolderError for blocks that the folder does not have.
        """
        raise NotImplementedError

    @staticmethod
    def layout_of(folder: BlockFolder, first_block: int, last_block: int) -> PageLayout:
        """The page layout that a pool for these blocks must have."""
        raise NotImplementedError

    def run(self, batch: Batch) -> StageOutput:
        """Run every block on the batch.

        Deterministic: a row's result depends on the tokens of its request up to that row and on nothing else, bit by
        bit in precisions marked exact. A row that is not finite is reported in the output, not raised. Raises
        ExecutionError (naming the block) when a block fails as a whole; then the pages named by the batch hold
        rubbish from each segment's first position on, and running the same batch again is allowed.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Drop sessions, buffers and memory maps. The executor is useless afterwards."""
        raise NotImplementedError
