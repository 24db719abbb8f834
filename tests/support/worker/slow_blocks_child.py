"""The process of a device on which each ONNX block takes BLOCK_S seconds, once its stage is loaded."""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock, Value
from blockrelay_worker.execution.process import child
from blockrelay_worker.execution.process.frames import Message

_run = AsIsBlock.run
_load = child.Child._load  # pyright: ignore[reportPrivateUsage]
_loaded = False


def _runs(self: AsIsBlock, given: Mapping[str, Value], pools: Mapping[str, Any]) -> dict[str, Value]:
    if _loaded:
        time.sleep(float(os.environ["BLOCK_S"]))
    return _run(self, given, pools)


def _loads(self: child.Child, fields: Mapping[str, Any]) -> Message:
    global _loaded
    answer = _load(self, fields)
    _loaded = True
    return answer


AsIsBlock.run = _runs
child.Child._load = _loads  # pyright: ignore[reportPrivateUsage]
sys.exit(child.main())
