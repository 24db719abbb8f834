"""A GPU worker that fails on command, so that the hand-over to the CPU can be tested and shown without a broken GPU."""

from typing import Protocol

from blockrelay.errors import ExecutionError
from blockrelay_worker.batch import Batch, StageOutput


class Executor(Protocol):
    """Run one stage on one batch; ExecutionError (naming the block) when it fails as a whole."""

    def run(self, batch: Batch) -> StageOutput: ...


class FailingExecutor:
    """Runs `after` batches, then fails every one at `block`."""

    def __init__(self, executor: Executor, *, after: int, block: str) -> None:
        self._executor, self._left, self._block = executor, after, block

    def run(self, batch: Batch) -> StageOutput:
        if self._left <= 0:
            raise ExecutionError(f"{self._block}: injected GPU failure", block=self._block)
        self._left -= 1
        return self._executor.run(batch)
