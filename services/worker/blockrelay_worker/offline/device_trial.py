"""What a device makes of a small model: whether it gives the known answers, how closely, and how long it takes."""

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.known_answers import PAGES_NEEDED, furthest_row, known_answers
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from blockrelay_worker.execution.onnx.stage import OnnxStage
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.execution.self_test import fixed_tokens

#: Rows of a prompt that are timed, and how often each behind the first.
ROWS, TIMES = (1, 16, 64), 3


@dataclass(slots=True)
class DeviceTrial:
    """`within`: how far the worst row of all blocks together is from the reference's, as a part of its length; None
    where a known answer was off too far. `problem`: what went wrong, such as that answer; empty if nothing did. Seconds
    by rows: the first run (kernels may be compiled), and the median of those behind it."""

    device: str
    known_answers: bool = False
    within: float | None = None
    load_s: float | None = None
    first_s: dict[str, float] = field(default_factory=dict[str, float])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    problem: str = ""


def try_device(provider: Provider, folder: BlockFolder) -> DeviceTrial:
    """All blocks of the folder as one stage on the device. What fails there is told, not raised."""
    trial = DeviceTrial(device=provider.device)
    try:
        started = time.perf_counter()
        stage = OnnxExecutors(provider).load(folder, 1, folder.model.blocks, pages=PAGES_NEEDED)
        trial.load_s, trial.known_answers = time.perf_counter() - started, True
        trial.within = _error(stage, folder)
        for rows in ROWS:
            first, *others = (_seconds(stage, folder, rows) for _ in range(TIMES + 1))
            trial.first_s[str(rows)], trial.seconds[str(rows)] = first, median(others)
        stage.close()
    except Exception as error:  # noqa: BLE001 whatever a driver does is what people are to send
        trial.problem = str(error)
    return trial


def _error(stage: OnnxStage, folder: BlockFolder) -> float:
    def reference(of: BlockFolder, block: int) -> OnnxStage:
        return OnnxExecutors(CpuProvider()).load(of, block, block, pages=PAGES_NEEDED)

    return furthest_row(stage, known_answers(folder, 1, folder.model.blocks, reference))


def _seconds(stage: OnnxStage, folder: BlockFolder, rows: int) -> float:
    pages = tuple(range(pages_for(rows)))
    tokens: Any = np.asarray(fixed_tokens(folder.model, rows), np.int32)
    started = time.perf_counter()
    stage.run(Batch(segments=[Segment(rows=rows, first_position=0, pages=pages)], tokens=tokens, wanted=[rows - 1]))
    return time.perf_counter() - started
