"""What runs a stage: the seam between the engine and whatever computes."""

from typing import Protocol

from blockrelay_worker.execution.batch import Batch, StageOutput


class Executor(Protocol):
    """Run one stage on one batch; ExecutionError (naming the block) when it fails as a whole."""

    def run(self, batch: Batch) -> StageOutput: ...
