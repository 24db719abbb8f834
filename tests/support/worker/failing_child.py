"""The process of a device whose provider fails: with the text of FAIL_TEXT, at the runs that FAIL_AT names."""

import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.onnx.stage import OnnxStage
from blockrelay_worker.execution.process import child

_runs = 0
_computed = OnnxStage._computed  # pyright: ignore[reportPrivateUsage]


def _failing(self: OnnxStage, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    global _runs
    _runs += 1
    if str(_runs) in os.environ["FAIL_AT"].split(","):
        raise RuntimeError(os.environ["FAIL_TEXT"])
    return _computed(self, inputs)


if __name__ == "__main__":
    OnnxStage._computed = _failing  # pyright: ignore[reportPrivateUsage]
    sys.exit(child.main())
