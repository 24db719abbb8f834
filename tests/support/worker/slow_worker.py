"""A worker for which each row of a stage takes SLOW_ROW_S seconds more, as on a CPU that is a hundred times slower."""

import os
import sys
import time

from blockrelay_worker.__main__ import main
from blockrelay_worker.execution.batch import Batch, StageOutput
from blockrelay_worker.execution.cpu.stage import StageExecutor

_run = StageExecutor.run


def _runs(self: StageExecutor, batch: Batch) -> StageOutput:
    time.sleep(sum(segment.rows for segment in batch.segments) * float(os.environ["SLOW_ROW_S"]))
    return _run(self, batch)


if __name__ == "__main__":
    StageExecutor.run = _runs
    sys.exit(main())
