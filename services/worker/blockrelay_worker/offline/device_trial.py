"""What a device makes of a small model: whether it gives the known answers, how closely, and how long it takes."""

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import KnownAnswerMismatch
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.known_answers import PAGES_NEEDED, TOLERANCES, check, known_answers
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from blockrelay_worker.execution.onnx.stage import OnnxStage
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.execution.self_test import fixed_tokens

#: Rows of a prompt that are timed, how often each behind the first, and errors (as parts of a row's length) that are
#: tried: each takes as long as loading, on a slow driver a minute.
ROWS, TIMES = (1, 16, 64), 3
_CLOSENESS = (1e-6, 1e-5)


@dataclass(slots=True)
class DeviceTrial:
    """`within`: the smallest of some errors that no known answer was further off than; None where one was off too far.
    `problem`: what went wrong, such as that answer; empty if nothing did. Seconds by rows: the first run (kernels may
    be compiled), and the median of those behind it."""

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
        trial.within = _closeness(stage, folder)
        for rows in ROWS:
            first, *others = (_seconds(stage, folder, rows) for _ in range(TIMES + 1))
            trial.first_s[str(rows)], trial.seconds[str(rows)] = first, median(others)
        stage.close()
    except Exception as error:  # noqa: BLE001 whatever a driver does is what people are to send
        trial.problem = str(error)
    return trial


def _closeness(stage: OnnxStage, folder: BlockFolder) -> float:
    def reference(of: BlockFolder, block: int) -> OnnxStage:
        return OnnxExecutors(CpuProvider()).load(of, block, block, pages=PAGES_NEEDED)

    answers = known_answers(folder, 1, folder.model.blocks, reference)
    for error in _CLOSENESS:
        try:
            check(stage, answers, where="the device", tolerance=error)
        except KnownAnswerMismatch:
            continue
        return error
    return TOLERANCES["float32"]  # with which it was loaded


def _seconds(stage: OnnxStage, folder: BlockFolder, rows: int) -> float:
    pages = tuple(range(pages_for(rows)))
    tokens: Any = np.asarray(fixed_tokens(folder.model, rows), np.int32)
    started = time.perf_counter()
    stage.run(Batch(segments=[Segment(rows=rows, first_position=0, pages=pages)], tokens=tokens, wanted=[rows - 1]))
    return time.perf_counter() - started
