"""A worker of the class gpu that fails: it computes by the kernels for CPUs, FAIL_AFTER batches, then every one fails.

What becomes of its requests is the same as behind a GPU, and their tokens are those of CPUs, bit by bit.
"""

import os
import sys

from blockrelay.errors import ExecutionError
from blockrelay.settings import WorkerSettings
from blockrelay_worker.__main__ import main
from blockrelay_worker.execution.batch import Batch, StageOutput
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.fault_injection import WrappingExecutor, with_faults
from blockrelay_worker.lifecycle import service
from tests.support.worker.playing_gpu import play_gpus


class FailingExecutor(WrappingExecutor):
    """Runs `after` batches, then fails every one at `block`."""

    def __init__(self, executor: Executor, *, after: int, block: str) -> None:
        super().__init__(executor)
        self._left, self._block = after, block

    def run(self, batch: Batch) -> StageOutput:
        if self._left <= 0:
            raise ExecutionError(f"{self._block}: injected GPU failure", block=self._block)
        self._left -= 1
        return super().run(batch)


def failing(executor: Executor, settings: WorkerSettings, *, vocabulary: int) -> Executor:
    """Makes the stage fail, beside the faults that the settings ask for."""
    assert isinstance(executor, StageExecutor)
    block, after = f"block_{executor.first_block}", int(os.environ["FAIL_AFTER"])
    return FailingExecutor(with_faults(executor, settings, vocabulary=vocabulary), after=after, block=block)


if __name__ == "__main__":
    play_gpus()
    service.with_faults = failing
    sys.exit(main())
