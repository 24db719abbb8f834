"""The process of a device that does what files in the folder FAULTS say, for as long as they are there.

oom        every step fails for want of memory
load       a stage that is loaded waits until the file has gone
nan        the next step gets rows that are not finite, once: the step takes the file away. Of ONNX blocks that are run
           as they are it is the block that the file names which gives them
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock, Value, on_host
from blockrelay_worker.execution.onnx.providers.provider import Place
from blockrelay_worker.execution.onnx.stage import OnnxStage
from blockrelay_worker.execution.process import child
from blockrelay_worker.execution.process.frames import Message

LOOK_S = 0.02
_faults = Path(os.environ["FAULTS"])
_computed = OnnxStage._computed  # pyright: ignore[reportPrivateUsage]
_run_block = AsIsBlock.run
_load = child.Child._load  # pyright: ignore[reportPrivateUsage]
_serving = False


def _loaded(self: child.Child, fields: Mapping[str, Any]) -> Message:
    global _serving
    _serving = False  # known answers are no steps
    while (_faults / "load").exists():
        time.sleep(LOOK_S)
    answer = _load(self, fields)
    _serving = True
    return answer


def _commanded(
    self: OnnxStage, inputs: Mapping[str, NDArray[Any]], stays: Mapping[str, Place] | None = None
) -> dict[str, Any]:
    if _serving and (_faults / "oom").exists():
        raise RuntimeError("CUDA failure 2: out of memory")
    if _serving and _taken("nan"):
        inputs = {name: rows * np.float32("nan") if name == "hidden" else rows for name, rows in inputs.items()}
    return _computed(self, inputs, stays)


def _commanded_block(self: AsIsBlock, given: Mapping[str, Value], pools: Mapping[str, Any]) -> dict[str, Value]:
    if _serving and (_faults / "oom").exists():
        raise RuntimeError("CUDA failure 2: out of memory")
    found = _run_block(self, given, pools)
    if _serving and _named("nan") == self.name and _taken("nan"):
        return {name: _not_finite(on_host(value)) for name, value in found.items()}
    return found


def _not_finite(value: NDArray[Any]) -> NDArray[Any]:
    return np.full_like(value, np.nan) if value.dtype.kind == "f" else value


def _named(name: str) -> str:
    try:
        return (_faults / name).read_text()
    except FileNotFoundError:
        return ""


def _taken(name: str) -> bool:
    try:
        (_faults / name).unlink()
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    child.Child._load = _loaded  # pyright: ignore[reportPrivateUsage]
    OnnxStage._computed = _commanded  # pyright: ignore[reportPrivateUsage]
    AsIsBlock.run = _commanded_block
    sys.exit(child.main())
