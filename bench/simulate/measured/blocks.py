"""What the blocks of a model cost on this host, in seconds of CPU: steps of decode rows and of prompts, one thread.

`blockrelay profile` measures rows of requests of their own in wall time; here rows of prompts count too, which share
their keys, and a neighbour on the host does not.
"""

import time
from collections.abc import Mapping
from statistics import median

import numpy as np

from bench.simulate.costs import BlockCosts
from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.loader import executors_for
from blockrelay_worker.execution.page_layout import pages_for

#: Requests that decode, with so many tokens behind each; rows of one prompt.
DECODING, PROMPTS, CONTEXT = (1, 2, 4, 8, 16, 32), (64, 256), 64
#: With so many tokens behind them, which tells what attention costs.
LONGER, ATTENDING, ATTENDING_PROMPT = 512, 16, 64
RUNS, SHORT_S = 15, 0.3

_Seconds = Mapping[int, float]


def block_costs(folder: BlockFolder) -> tuple[BlockCosts, ...]:
    """Of each block, in their order; the last is the head."""
    most = max(DECODING) * pages_for(CONTEXT + 1) + ATTENDING * pages_for(LONGER + 1) + pages_for(LONGER + 256)
    executor = executors_for("cpu", folder, threads=1).load(folder, 1, folder.model.blocks, pages=most)
    try:
        decoding = {rows: _step(executor, folder, [(1, CONTEXT)] * rows) for rows in DECODING}
        prompts = {rows: _step(executor, folder, [(rows, 0)]) for rows in PROMPTS}
        further = _step(executor, folder, [(1, LONGER)] * ATTENDING)
        behind = _step(executor, folder, [(ATTENDING_PROMPT, LONGER)])
    finally:
        executor.close()
    found: list[BlockCosts] = []
    for block in range(1, folder.model.blocks + 1):
        if block == folder.model.blocks:  # a row for each token: prompts have one
            found.append(BlockCosts(rows={rows: seconds[block] for rows, seconds in decoding.items()}))
            continue
        decoded = (further[block] - decoding[ATTENDING][block]) / (ATTENDING * (LONGER - CONTEXT))
        prompt = (behind[block] - prompts[ATTENDING_PROMPT][block]) / (ATTENDING_PROMPT * LONGER)
        decoded, prompt = max(0.0, decoded), max(0.0, prompt)
        rows = {rows: seconds[block] - rows * CONTEXT * decoded for rows, seconds in decoding.items()}
        rows |= {rows: seconds[block] - rows * rows / 2 * prompt for rows, seconds in prompts.items()}
        found.append(BlockCosts(rows=rows, attended=decoded, attended_prompt=prompt))
    return tuple(found)


def _step(executor: Executor, folder: BlockFolder, segments: list[tuple[int, int]]) -> _Seconds:
    """Seconds of CPU by block, of a step of (rows, tokens behind them); medians."""
    chance = np.random.default_rng(1)
    taken = [executor.pool.allocate(pages_for(behind + rows)) for rows, behind in segments]
    parts = [Segment(rows=r, first_position=b, pages=pages) for (r, b), pages in zip(segments, taken, strict=True)]
    tokens = chance.integers(0, folder.model.vocab_size, sum(rows for rows, _ in segments), dtype=np.int32)
    ends = np.cumsum([rows for rows, _ in segments]) - 1
    batch = Batch(segments=parts, tokens=tokens, wanted=[int(end) for end in ends])
    executor.run(batch)
    shares: list[Mapping[str, float]] = []
    cpu: list[float] = []
    until = time.monotonic() + SHORT_S
    while len(cpu) < RUNS or time.monotonic() < until:
        began = time.thread_time()
        shares.append(executor.run(batch).seconds)
        cpu.append(time.thread_time() - began)
    for pages in taken:
        executor.pool.free(pages)
    blocks = {name: median(one[name] / sum(one.values()) for one in shares) for name in shares[0]}
    return {int(name.removeprefix("block_")): share * median(cpu) for name, share in blocks.items()}
