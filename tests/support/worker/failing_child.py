"""The process of a device whose provider fails at the runs that FAIL_AT names, with the text of FAIL_TEXT, computes
wrong numbers from the run WRONG_FROM on, gives NaN in the first row of the runs that NAN_AT names, and takes 90 ms
instead of 20 from the run SLOW_FROM on, until it is cleaned up if CLEANING_HELPS. Runs count behind the load of a
stage, from 1. What HANGS_AT names, open or load, it never does, and says so by a file HANGS_FILE; at what DIES_AT
names it ends, until there is a file DIES_UNTIL. What WRONG_AT names, open or load, shows that it computes wrong
numbers. The first LOADS_FAIL times that a stage is made fail with FAIL_TEXT, and all on the devices that FAILS_ON
names, and of the folders whose keys FAILS_OF names; on those of RUNS_FAIL_ON all runs from FAIL_FROM on do. There
are as many devices cpu:0, cpu:1, ... as a test wants, each with numerics of its own."""

import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.onnx.known_answers import Answers
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Place, Provider
from blockrelay_worker.execution.onnx.stage import OnnxStage
from blockrelay_worker.execution.process import child
from blockrelay_worker.execution.process.frames import Message

STEP_S, SLOW_S = 0.02, 0.09
_run: int | None = None
_slow_from = float(os.environ.get("SLOW_FROM", "inf"))
_computed = OnnxStage._computed  # pyright: ignore[reportPrivateUsage]
_clean_up = OnnxStage.clean_up
_answer = child.Child.answer
_loads_fail = int(os.environ.get("LOADS_FAIL", "0"))
_made = OnnxExecutors.loaded
_open_provider = child.open_provider
_load = child.Child._load  # pyright: ignore[reportPrivateUsage]


class Numbered(CpuProvider):
    """One of several devices."""

    @property
    def identity(self) -> tuple[str, ...]:
        return (*super().identity, self.device)


def _opened(device: str) -> Provider:
    if not re.fullmatch(r"cpu:\d", device):
        return _open_provider(device)
    provider = Numbered()
    provider.device = device
    return provider


def _misbehaves(self: child.Child, message: Message) -> Message:
    if message.kind == os.environ.get("HANGS_AT"):
        Path(os.environ["HANGS_FILE"]).touch()
        threading.Event().wait()
    if message.kind == os.environ.get("DIES_AT") and not Path(os.environ.get("DIES_UNTIL", "/nowhere")).exists():
        os._exit(3)
    if message.kind == os.environ.get("WRONG_AT"):
        return Message(
            "refused", {"type": "KnownAnswerMismatch", "text": "cpu computes wrong numbers", "block": "block_1"}
        )
    return _answer(self, message)


def _loaded(self: child.Child, fields: Mapping[str, Any]) -> Message:
    global _run
    _run = None  # what it computes to know the answers of its canary is right
    answer = _load(self, fields)
    _run = 0
    return answer


def _made_or_not(
    self: OnnxExecutors, folder: BlockFolder, first_block: int, last_block: int, *, pages: int, weight_room: int
) -> tuple[OnnxStage, Answers]:
    global _loads_fail
    device = self._provider.device  # pyright: ignore[reportPrivateUsage]
    refused = folder.model_key in os.environ.get("FAILS_OF", "").split(",")
    if _loads_fail or refused or device in os.environ.get("FAILS_ON", "").split(","):
        _loads_fail = max(0, _loads_fail - 1)
        raise RuntimeError(os.environ["FAIL_TEXT"])
    return _made(self, folder, first_block, last_block, pages=pages, weight_room=weight_room)


def _failing(
    self: OnnxStage, inputs: Mapping[str, NDArray[Any]], stays: Mapping[str, Place] | None = None
) -> dict[str, Any]:
    global _run
    if _run is None:
        return _computed(self, inputs, stays)
    _run += 1
    if str(_run) in os.environ.get("FAIL_AT", "").split(","):
        raise RuntimeError(os.environ["FAIL_TEXT"])
    device = self._provider.device  # pyright: ignore[reportPrivateUsage]
    if device in os.environ.get("RUNS_FAIL_ON", "").split(",") and _run >= int(os.environ["FAIL_FROM"]):
        raise RuntimeError(os.environ["FAIL_TEXT"])
    found = _computed(self, inputs, stays)
    if "SLOW_FROM" in os.environ:  # beside these a busy machine does not count
        time.sleep(SLOW_S if _slow_from <= _run else STEP_S)
    if str(_run) in os.environ.get("NAN_AT", "").split(","):
        found["hidden_out" if "hidden_out" in found else "sums"][:1] = np.nan
    if _run >= float(os.environ.get("WRONG_FROM", "inf")):
        return {name: rows * np.float32(1.1) for name, rows in found.items() if name not in (stays or {})} | {
            name: found[name] for name in stays or {}
        }
    return found


def _cleaned(self: OnnxStage) -> None:
    global _slow_from
    _clean_up(self)
    if "CLEANING_HELPS" in os.environ:
        _slow_from = float("inf")


if __name__ == "__main__":
    OnnxStage.clean_up = _cleaned
    child.open_provider = _opened
    OnnxExecutors.loaded = _made_or_not
    child.Child.answer = _misbehaves
    child.Child._load = _loaded  # pyright: ignore[reportPrivateUsage]
    OnnxStage._computed = _failing  # pyright: ignore[reportPrivateUsage]
    sys.exit(child.main())
