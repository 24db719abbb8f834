"""Tries a device with a small model: are its answers right, how exact are they, and how long do they take?"""

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

#: Prompt lengths (rows) that are timed, and the number of timed runs of each after the first.
ROWS, TIMES = (1, 16, 64), 3


@dataclass(slots=True)
class DeviceTrial:
    """The result of a trial, as `blockrelay gpu-report` prints it."""

    device: str
    known_answers: bool = False
    """All blocks gave their known answers within tolerance."""
    within: float | None = None
    """Distance of the worst row from the reference's, as a share of its length; None if the trial failed before."""
    load_s: float | None = None
    """Seconds until the stage was loaded and had given its known answers; None if the trial failed before."""
    first_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of the first run, by its rows: kernels may be compiled in it."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Median seconds of the later runs, by their rows."""
    problem: str = ""
    """What failed; empty if nothing did."""


def try_device(provider: Provider, folder: BlockFolder) -> DeviceTrial:
    """Runs all blocks of the folder as one stage on the device. Failures are in the result, and are not raised."""
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
