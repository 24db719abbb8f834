"""Measures the seconds of each block of a model, by the rows of a step and the tokens that each row attends to.

Blocks run one after the other, as in a stage: so each reads its weights from memory, and not from a CPU cache. A model
that does not fit into memory runs in windows of as many blocks as fit.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import UsageError
from blockrelay.planning.profile import BASE_CONTEXT
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.loader import Executors
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.offline.profiling.samples import ROUNDS, Samples, runs_of_a_round
from blockrelay_worker.offline.profiling.targets import StageBytes, Target

#: Numbers of rows of the steps that are measured.
ROWS = (1, 4, 16, 64, 256)
#: Tokens of the long context at which steps are measured, beside the base context.
LONG_CONTEXT = 2048
#: Maximum number of rows for ONNX blocks of other makers at contexts above the base: they copy the keys and values of
#: all rows in every layer, so that a step of 256 rows would take gigabytes and minutes.
MAX_ROWS_OF_OTHERS = 16
#: Additional rounds for noisy shapes.
EXTRA_ROUNDS = 4
#: Spread (half the distance of the quartiles, as a share of the median) above which a figure is noisy.
NOISY = 0.05


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A step to measure: `rows` requests, each with one row that attends to `context` tokens."""

    rows: int
    context: int

    @property
    def pages(self) -> int:
        """Number of KV pages of all its requests."""
        return self.rows * pages_for(self.context)


@dataclass(frozen=True, slots=True)
class BlockWindow:
    """Blocks `first` to `last` (from 1, both included) that are measured together, with this many KV pages."""

    first: int
    last: int
    pages: int


#: Samples (seconds of one run of the block) by block (from 1) and shape.
Times = dict[tuple[int, BatchShape], Samples]


def shapes(folder: BlockFolder) -> list[BatchShape]:
    """The steps to measure for a model: ROWS at the base, the long and the model's longest context.

    No context is longer than the model's. ONNX blocks of other makers have at most MAX_ROWS_OF_OTHERS rows at contexts
    above the shortest one.
    """
    longest, ours = folder.model.max_position, folder.model.onnx_blocks is None
    contexts = sorted({min(context, longest) for context in (BASE_CONTEXT, LONG_CONTEXT, longest)})
    return [
        BatchShape(rows, context)
        for context in contexts
        for rows in ROWS
        if ours or context == contexts[0] or rows <= MAX_ROWS_OF_OTHERS
    ]


def one_row(folder: BlockFolder) -> BatchShape:
    """The only step of a profile in the source form: one row at the base context."""
    return BatchShape(1, min(BASE_CONTEXT, folder.model.max_position))


def windows(folder: BlockFolder, sizes: StageBytes, wanted: Sequence[BatchShape]) -> Iterator[BlockWindow]:
    """Splits the model into windows that fit into `sizes.room`.

    A window has as many KV pages as fit, at least 2, at most those of the largest shape in `wanted`. It always has
    enough for the shapes at the shortest context. `wanted` must not be empty. Raises UsageError if a block does not fit
    alone.
    """
    base = max(shape.pages for shape in wanted if shape.context == min(s.context for s in wanted))
    largest = max(shape.pages for shape in wanted)
    first = 1
    while first <= folder.model.blocks:
        last = folder.model.blocks
        while (left := sizes.room - sizes.weights(first, last)) < base * sizes.page(first, last):
            if last == first:
                raise UsageError(f"block_{first} does not fit into the {sizes.room >> 20} MiB that may be taken here")
            last -= 1
        page_bytes = sizes.page(first, last)
        yield BlockWindow(first, last, max(2, min(largest, left // page_bytes if page_bytes else largest)))
        first = last + 1


def whole_window(
    folder: BlockFolder, sizes: StageBytes, wanted: Sequence[BatchShape]
) -> tuple[BlockWindow, int | None]:
    """The one window with all blocks, for ONNX blocks of other makers, and the limit of their sessions in bytes.

    The limit is None if all sessions fit into memory together. `wanted` must not be empty. The time to create sessions
    is not measured. Raises UsageError if a block does not fit alone.
    """
    blocks = folder.model.blocks
    page, context = sizes.page(1, blocks), min(shape.context for shape in wanted)
    base = max(shape.pages for shape in wanted if shape.context == context)
    largest = max(shape.pages for shape in wanted)
    left = sizes.room - sizes.weights(1, blocks)
    if left >= base * page:
        return BlockWindow(1, blocks, max(2, min(largest, left // page))), None
    left = sizes.room - base * page
    for block in range(1, blocks + 1):
        if sizes.weights(block, block) > left:
            raise UsageError(f"block_{block} does not fit into the {sizes.room >> 20} MiB that may be taken here")
    return BlockWindow(1, blocks, base), left


def measure(
    folder: BlockFolder,
    executors: Executors,
    window: BlockWindow,
    wanted: Sequence[BatchShape],
    progress: Callable[[int], None],
) -> Times:
    """Measures the window's blocks in every shape that fits into its pages.

    Calls `progress(1)` after each of the ROUNDS rounds of a shape, and not after additional rounds for noisy shapes.
    Raises BlockFolderError if a block cannot be loaded or gives a wrong known answer, and ExecutionError if a step
    fails. A device in a process of its own also raises DeviceLost, DeviceFailed or UsageError.
    """
    executor = executors.load(folder, window.first, window.last, pages=window.pages)
    times: Times = {}
    try:
        fitting = [shape for shape in wanted if shape.pages <= window.pages]
        for _ in range(ROUNDS):
            for shape in fitting:
                _round(executor, folder, window, shape, times)
                progress(1)
        for _ in range(EXTRA_ROUNDS):
            for shape in fitting:
                if any(times[block, shape].spread > NOISY for block in range(window.first, window.last + 1)):
                    _round(executor, folder, window, shape, times)
    finally:
        executor.close()
    return times


def load_times(folder: BlockFolder, target: Target, progress: Callable[[int], None]) -> dict[int, Samples]:
    """Measures the seconds to load each block alone and check its known answer; its file may be in the page cache.

    Returns the samples by block, from 1. Calls `progress(1)` after each load, `target.loads` times for each block.
    Raises BlockFolderError if a block cannot be loaded or gives a wrong known answer, UsageError for a device that
    cannot run this model, and DeviceLost, DeviceFailed or ExecutionError if the device or ONNX Runtime fails.
    """
    loads = {index: Samples() for index in range(1, folder.model.blocks + 1)}
    for _ in range(target.loads):
        with target.opened() as executors:
            for index, samples in loads.items():
                started = time.perf_counter()
                executors.load(folder, index, index, pages=2).close()
                samples.seconds.append(time.perf_counter() - started)
                progress(1)
    return loads


def _round(executor: Executor, folder: BlockFolder, window: BlockWindow, shape: BatchShape, times: Times) -> None:
    """Runs the shape for one round, after a warm-up run that is not counted."""
    each = pages_for(shape.context)
    pages = executor.pool.allocate(shape.pages)
    batch = _batch(executor, folder, shape, [pages[at : at + each] for at in range(0, len(pages), each)])
    executor.run(batch)
    for _ in runs_of_a_round():
        for name, seconds in executor.run(batch).seconds.items():
            block = int(name.removeprefix("block_"))
            times.setdefault((block, shape), Samples()).seconds.append(seconds)
    executor.pool.free(pages)


def _batch(executor: Executor, folder: BlockFolder, shape: BatchShape, pages: Sequence[Sequence[int]]) -> Batch:
    """A batch of decode rows of long requests. The content of their pages does not change the time."""
    segments = [Segment(rows=1, first_position=shape.context - 1, pages=own) for own in pages]
    random = np.random.default_rng(1)
    wanted = range(shape.rows) if executor.gives_logits else ()
    if executor.takes_tokens:
        tokens = random.integers(0, folder.model.vocab_size, shape.rows, dtype=np.int32)
        return Batch(segments=segments, tokens=tokens, wanted=wanted)
    hidden = random.standard_normal((shape.rows, folder.model.hidden_size), np.float32)
    return Batch(segments=segments, hidden=hidden, wanted=wanted)
