"""What a device makes of a model: tokens per second, times of steps and of hand-overs: `python -m bench.gpu_kit.speed
FOLDER [--device webgpu:0] [--small]`.

In this process, as the process of a device does it: ids of greedy tokens come down, nothing else. A hand-over is what a
border between two stages costs: rows come down and go up again, and go from one process to the next.
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
from blockrelay_worker.execution.process.executors import DeviceExecutors
from blockrelay_worker.execution.selection import Largest, Need

#: Requests at once, and rows of one prompt.
REQUESTS, PROMPTS = (1, 16), (64, 512)
#: Tokens of each request's prompt, new ones, and the first of these, which are not timed.
PROMPT, NEW, WARM = 64, 96, 8
SMALL_PROMPTS, SMALL_NEW = (8, 40), 12
#: How often a prompt or a page is timed behind the first.
TIMES = 5


@dataclass(slots=True)
class Request:
    """Greedy: `tokens`, prompt first, of which all but the last have been computed into `pages`."""

    pages: list[int]
    tokens: list[int] = field(default_factory=list[int])


def _segment(request: Request) -> Segment:
    return Segment(rows=1, first_position=len(request.tokens) - 1, pages=request.pages)


def token_of(output: StageOutput, index: int) -> int:
    """The largest logit's id, whichever way the executor gives rows."""
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
    """Tokens per second of so many greedy requests at once, and the median time of a step."""
    random = np.random.default_rng(requests)
    all_of_them = [Request(executor.pool.allocate(pages_for(PROMPT + new))) for _ in range(requests)]
    for one in all_of_them:
        one.tokens = random.integers(3, vocabulary, PROMPT).tolist()
        prompt = Segment(rows=PROMPT, first_position=0, pages=one.pages)
        one.tokens.append(token_of(_run(executor, [prompt], one.tokens), 0))
    times: list[float] = []
    for _ in range(new - 1):
        began = time.perf_counter()
        output = _run(executor, [_segment(one) for one in all_of_them], [one.tokens[-1] for one in all_of_them])
        for index, one in enumerate(all_of_them):
            one.tokens.append(token_of(output, index))
        times.append(time.perf_counter() - began)
    for one in all_of_them:
        executor.pool.free(one.pages)
    timed = times[min(WARM, len(times) // 2) :]
    return {
        "tok_s": round(requests * len(timed) / sum(timed), 1),
        "step_ms": _ms(statistics.median(timed)),
        "first_step_ms": _ms(times[0]),
    }


def _median_of(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the first time, and the median of those behind it."""
    times: list[float] = []
    for _ in range(TIMES + 1):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times[0], statistics.median(times[1:])


def prompt(executor: Executor, rows: int, vocabulary: int) -> dict[str, float]:
    """Milliseconds of a prompt of so many rows, the first time and later."""
    pages = executor.pool.allocate(pages_for(rows))
    tokens = np.random.default_rng(rows).integers(3, vocabulary, rows).tolist()
    segment = Segment(rows=rows, first_position=0, pages=pages)
    first, later = _median_of(lambda: _run(executor, [segment], tokens))
    executor.pool.free(pages)
    return {"ms": _ms(later), "first_ms": _ms(first), "tok_s": round(rows / later, 1)}


def hand_over(executors: OnnxExecutors, folder: BlockFolder, whole: Executor) -> dict[str, Any]:
    """What a border in the middle costs one row: the two halves against the whole, and the way between processes."""
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
    """A step of the bundled model on a device that has its own process, and the part of it that is the way there."""
    folder = open_block_folder(BUNDLED_MODEL)
    executors = DeviceExecutors(device, folder, python=sys.executable, limit_s=60)
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
