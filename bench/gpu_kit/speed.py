"""Measures a model on a device: tokens per second, and times of steps and of hand-overs between stages.

`python -m bench.gpu_kit.speed FOLDER [--device webgpu:0] [--small]` computes in this process as the process of a device
does: only the ids of greedy tokens come back from the device. A hand-over is what a border between two stages costs:
hidden states come from the device, go from one process to the next, and go to the device again.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.gpu_kit.parts import tell
from bench.hop import one_way_s
from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_worker.execution.batch import Batch, Segment, StageOutput
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from blockrelay_worker.execution.selection import Largest, Need

#: Numbers of requests at once, and lengths of prompts in tokens.
REQUESTS, PROMPTS = (1, 16), (64, 512)
#: Tokens of each request's prompt, new tokens, and how many of the first new tokens are not timed.
PROMPT, NEW, WARM = 64, 96, 8
SMALL_PROMPTS, SMALL_NEW = (8, 40), 12
#: How often a prompt or a page is timed after the first time.
TIMES = 5


@dataclass(slots=True)
class Request:
    """A greedy request."""

    pages: list[int]
    """Its KV pages."""
    tokens: list[int] = field(default_factory=list[int])
    """Its tokens, the prompt first; KV pages have all but the last one."""


def _segment(request: Request) -> Segment:
    return Segment(rows=1, first_position=len(request.tokens) - 1, pages=request.pages)


def token_of(output: StageOutput, index: int) -> int:
    """Returns the token id of the largest logit of row `index`, in either form in which executors give logits."""
    rows = output.logits if output.rows is None else output.rows
    assert rows is not None
    row = rows[index]
    return int(row.ids[np.argmax(row.logits)] if isinstance(row, Largest) else np.argmax(row))


def _run(executor: Executor, segments: Sequence[Segment], tokens: Sequence[int]) -> StageOutput:
    ends = np.cumsum([segment.rows for segment in segments]) - 1
    needs = [Need(temperature=0.0)] * len(segments)
    return executor.run(
        Batch(segments=segments, tokens=np.array(tokens, np.int32), wanted=[int(end) for end in ends], needs=needs)
    )


def decoding(executor: Executor, requests: int, new: int, vocabulary: int) -> dict[str, Any]:
    """Measures `requests` greedy requests at once: tokens per second, and milliseconds of the median and first step.

    Each has PROMPT random token ids below `vocabulary`, and generates `new` tokens.
    """
    random = np.random.default_rng(requests)
    every = [Request(executor.pool.allocate(pages_for(PROMPT + new))) for _ in range(requests)]
    for one in every:
        one.tokens = random.integers(3, vocabulary, PROMPT).tolist()
        prompt = Segment(rows=PROMPT, first_position=0, pages=one.pages)
        one.tokens.append(token_of(_run(executor, [prompt], one.tokens), 0))
    times: list[float] = []
    for _ in range(new - 1):
        began = time.perf_counter()
        output = _run(executor, [_segment(one) for one in every], [one.tokens[-1] for one in every])
        for index, one in enumerate(every):
            one.tokens.append(token_of(output, index))
        times.append(time.perf_counter() - began)
    for one in every:
        executor.pool.free(one.pages)
    timed = times[min(WARM, len(times) // 2) :]
    return {
        "tok_s": round(requests * len(timed) / sum(timed), 1),
        "step_ms": _ms(statistics.median(timed)),
        "first_step_ms": _ms(times[0]),
    }


def _median_of(run: Callable[[], object]) -> tuple[float, float]:
    """Calls `run` repeatedly; returns the seconds of the first call, and the median of the later ones."""
    times: list[float] = []
    for _ in range(TIMES + 1):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times[0], statistics.median(times[1:])


def prompt(executor: Executor, rows: int, vocabulary: int) -> dict[str, float]:
    """Measures a prompt of `rows` tokens: milliseconds the first time and later, and tokens per second.

    The tokens are random ids below `vocabulary`.
    """
    pages = executor.pool.allocate(pages_for(rows))
    tokens = np.random.default_rng(rows).integers(3, vocabulary, rows).tolist()
    segment = Segment(rows=rows, first_position=0, pages=pages)
    first, later = _median_of(lambda: _run(executor, [segment], tokens))
    executor.pool.free(pages)
    return {"ms": _ms(later), "first_ms": _ms(first), "tok_s": round(rows / later, 1)}


def hand_over(executors: OnnxExecutors, folder: BlockFolder, whole: Executor) -> dict[str, Any]:
    """Measures what a border in the middle of the model costs one token.

    Milliseconds of a step in two halves and in one, of the way between two processes, and of a KV page from the device.
    """
    middle, last = folder.model.blocks // 2, folder.model.blocks
    halves = [executors.load(folder, *part, pages=16) for part in ((1, middle), (middle + 1, last))]
    segment = Segment(rows=1, first_position=0, pages=[0])

    def in_halves() -> None:
        rows: NDArray[np.float32] | None = None
        for half in halves:
            tokens = np.array([5], np.int32) if half.takes_tokens else None
            needs = [Need(temperature=0.0)]
            rows = half.run(Batch(segments=[segment], tokens=tokens, hidden=rows, wanted=[0], needs=needs)).hidden

    _, apart = _median_of(in_halves)
    _, together = _median_of(lambda: _run(whole, [segment], [5]))
    for half in halves:
        half.close()
    hidden = folder.model.hidden_size
    return {
        "step_ms": _ms(together),
        "step_in_two_stages_ms": _ms(apart),
        "between_processes_ms": {str(rows): _ms(one_way_s(hidden, rows)) for rows in (1, 16)},
        "page_down_ms": _ms(_median_of(lambda: whole.export_pages([0]))[1]),
        "page_bytes": whole.layout.bytes_per_page,
    }


def in_a_process(device: str) -> dict[str, float]:
    """Measures a step of the bundled model on a device with a process of its own: all milliseconds, and those of the
    way to that process and back."""
    folder = open_block_folder(BUNDLED_MODEL)
    executors = DeviceExecutors(folder, Gpu(device, 60))
    try:
        stage = executors.load(folder, 1, folder.model.blocks, pages=16)
        segment = Segment(rows=1, first_position=0, pages=[0])
        moved: list[float] = []
        _, step = _median_of(lambda: moved.append(_run(stage, [segment], [5]).moved_s))
        return {"step_ms": _ms(step), "moved_ms": _ms(statistics.median(moved[1:]))}
    finally:
        executors.close()


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def main() -> int:
    """Measures everything, reports the figures after each measurement, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="webgpu:0")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    new, prompts = (SMALL_NEW, SMALL_PROMPTS) if options.small else (NEW, PROMPTS)
    folder, executors = open_block_folder(options.folder), OnnxExecutors(open_provider(options.device))
    vocabulary, began = folder.model.vocab_size, time.perf_counter()
    pages = max(max(REQUESTS) * pages_for(PROMPT + new), pages_for(max(prompts)))
    stage = executors.load(folder, 1, folder.model.blocks, pages=pages)
    figures: dict[str, Any] = {"load_s": round(time.perf_counter() - began, 2), "stage": stage.details}
    tell(figures)
    for requests in REQUESTS:
        figures[f"requests_{requests}"] = decoding(stage, requests, new, vocabulary)
        tell(figures)
    for rows in prompts:
        figures[f"prompt_{rows}"] = prompt(stage, rows, vocabulary)
        tell(figures)
    figures["hand_over"] = hand_over(executors, folder, stage)
    tell(figures)
    stage.close()
    figures["in_a_process"] = in_a_process(options.device)
    tell(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
