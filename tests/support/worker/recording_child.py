"""The process of a device that records decode steps, on ONNX Runtime's CPU kernels, which repeat nothing but have the
shapes and the memory of recorded steps. Repeating fails behind the load of a stage where REPEATING_FAILS."""

import os
import sys
from typing import Any

from blockrelay_worker.execution.onnx.compiled import captured
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.execution.process import child

_warm = captured.CapturedSteps.warm


def _failing(*_: Any) -> Any:
    raise RuntimeError("this device repeats no more")


def _warmed(self: captured.CapturedSteps) -> None:
    _warm(self)
    if "REPEATING_FAILS" in os.environ:
        captured.CapturedSteps._run = _failing  # pyright: ignore


if __name__ == "__main__":
    captured.MAX_GRAPHS = 2
    captured.CapturedSteps.warm = _warmed
    CpuProvider.captures = True
    sys.exit(child.main())
