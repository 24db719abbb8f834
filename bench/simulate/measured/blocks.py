"""Measures the blocks of a model on this host, in seconds of CPU of one thread: steps of decode rows and of prompts.

`blockrelay profile` measures decode rows only, in wall time. Here rows of prompts are measured too, which share their
keys, and other programs on the host do not count.
"""

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import fmean, median

import numpy as np

from bench.simulate.costs import BlockCosts
from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.loader import executors_for
from blockrelay_worker.execution.page_layout import pages_for

#: Numbers of decode rows, numbers of rows of one prompt, and the context (tokens) of each decode row.
DECODING, PROMPTS, CONTEXT = (1, 2, 4, 8, 16, 32), (64, 256), 64
#: A longer context, and the decode and prompt rows measured with it: the difference is the cost of attention.
LONGER, ATTENDING, ATTENDING_PROMPT = 512, 16, 64
ROUNDS, RUNS = 15, 4
#: Numbers of decode rows measured beside another process, and seconds of each measurement.
NEIGHBOURS, NEIGHBOUR_S = (1, 4, 8, 16, 32), 1.0

_Seconds = Mapping[int, float]
_Name = tuple[str, int]
_Part = tuple[int, int]


def block_costs(folder: BlockFolder) -> tuple[BlockCosts, ...]:
    """Measures the costs of each block, in their order; the last is the head."""
    most = max(DECODING) * pages_for(CONTEXT + 1) + ATTENDING * pages_for(LONGER + 1) + pages_for(LONGER + 256)
    executor = executors_for(folder, threads=1).load(folder, 1, folder.model.blocks, pages=most)
    steps = {("decoding", rows): [(1, CONTEXT)] * rows for rows in DECODING}
    steps |= {("prompt", rows): [(rows, 0)] for rows in PROMPTS}
    steps |= {
        ("longer", ATTENDING): [(1, LONGER)] * ATTENDING,
        ("behind", ATTENDING_PROMPT): [(ATTENDING_PROMPT, LONGER)],
    }
    try:
        timed = _timed(executor, folder, steps)
    finally:
        executor.close()
    decoding = {rows: timed["decoding", rows] for rows in DECODING}
    prompts = {rows: timed["prompt", rows] for rows in PROMPTS}
    further, behind = timed["longer", ATTENDING], timed["behind", ATTENDING_PROMPT]
    costs: list[BlockCosts] = []
    for block in range(1, folder.model.blocks + 1):
        if block == folder.model.blocks:  # the head computes one row for each new token, and so one of each prompt
            costs.append(BlockCosts(rows={rows: seconds[block] for rows, seconds in decoding.items()}))
            continue
        decoded = (further[block] - decoding[ATTENDING][block]) / (ATTENDING * (LONGER - CONTEXT))
        prompt = (behind[block] - prompts[ATTENDING_PROMPT][block]) / (ATTENDING_PROMPT * LONGER)
        decoded, prompt = max(0.0, decoded), max(0.0, prompt)
        rows = {rows: seconds[block] - rows * CONTEXT * decoded for rows, seconds in decoding.items()}
        rows |= {rows: seconds[block] - rows * rows / 2 * prompt for rows, seconds in prompts.items()}
        costs.append(BlockCosts(rows=rows, attended=decoded, attended_prompt=prompt))
    return tuple(costs)


def neighbour_ratios(model: Path) -> dict[int, float]:
    """Measures how many times as long a step takes while another process computes the same, by decode rows.

    Processes on different cores slow each other down because they share the memory.
    """
    context = multiprocessing.get_context("spawn")
    ratios: dict[int, float] = {}
    for rows in NEIGHBOURS:
        alone, beside = (_paces(context, model, rows, count) for count in (1, 2))
        ratios[rows] = max(1.0, fmean(beside) / alone[0])
    return ratios


def _paces(context: SpawnContext, model: Path, rows: int, count: int) -> list[float]:
    """Returns the seconds of CPU of a step in each of `count` processes that compute at once."""
    ready, pipes = context.Barrier(count), [context.Pipe(duplex=False) for _ in range(count)]
    processes = [context.Process(target=_pace, args=(model, rows, ready, write), daemon=True) for _, write in pipes]
    for process in processes:
        process.start()
    paces = [read.recv() for read, _ in pipes]
    for process in processes:
        process.join()
    return paces


def _pace(model: Path, rows: int, ready: Barrier, write: "Connection[float, float]") -> None:
    """Computes steps for NEIGHBOUR_S, together with other processes, and sends the seconds of CPU of a step."""
    folder = open_block_folder(model)
    pages = rows * pages_for(CONTEXT + 1)
    executor = executors_for(folder, threads=1).load(folder, 1, folder.model.blocks, pages=pages)
    segments = [
        Segment(rows=1, first_position=CONTEXT, pages=executor.pool.allocate(pages_for(CONTEXT + 1)))
        for _ in range(rows)
    ]
    batch = Batch(segments=segments, tokens=np.arange(rows, dtype=np.int32), wanted=range(rows))
    executor.run(batch)
    ready.wait()
    steps, cpu, until = 0, time.thread_time(), time.monotonic() + NEIGHBOUR_S
    while time.monotonic() < until:
        executor.run(batch)
        steps += 1
    write.send((time.thread_time() - cpu) / steps)


def _timed(executor: Executor, folder: BlockFolder, steps: Mapping[_Name, Sequence[_Part]]) -> dict[_Name, _Seconds]:
    """Returns the seconds of CPU of each block in each step; a step is parts of (rows, context before them).

    They are medians of rounds in which each step has its turn, so that a slow phase of the host affects all alike.
    """
    rounds: dict[_Name, list[_Seconds]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, parts in steps.items():
            rounds[name].append(_step(executor, folder, parts))
    return {name: {block: median(one[block] for one in each) for block in each[0]} for name, each in rounds.items()}


def _step(executor: Executor, folder: BlockFolder, parts: Sequence[_Part]) -> _Seconds:
    """Runs a step several times, and returns the mean seconds of CPU of each block."""
    chance = np.random.default_rng(1)
    allocated = [executor.pool.allocate(pages_for(behind + rows)) for rows, behind in parts]
    segments = [Segment(rows=r, first_position=b, pages=pages) for (r, b), pages in zip(parts, allocated, strict=True)]
    tokens = chance.integers(0, folder.model.vocab_size, sum(rows for rows, _ in parts), dtype=np.int32)
    ends = np.cumsum([rows for rows, _ in parts]) - 1
    batch = Batch(segments=segments, tokens=tokens, wanted=[int(end) for end in ends])
    executor.run(batch)  # not measured: caches are cold
    began = time.thread_time()
    shares = [executor.run(batch).seconds for _ in range(RUNS)]
    spent = (time.thread_time() - began) / RUNS
    for pages in allocated:
        executor.pool.free(pages)
    together = sum(sum(one.values()) for one in shares)
    return {int(name.removeprefix("block_")): spent * sum(one[name] for one in shares) / together for name in shares[0]}
