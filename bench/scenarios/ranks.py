"""Compares a stage of several ranks with one process of as many threads: `python -m bench.scenarios.ranks --model DIR`.

Both have the whole model and compute the same batches in turns: decode steps of 1 and of 16 requests, a prompt of 128
tokens, and four together. It prints the medians, their ratio (above 1: ranks are faster), and the memory of each rank.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.loader import executors_for
from blockrelay_worker.kernels.specification import PAGE

#: Tokens of a prompt, requests of the largest case, and tokens before a decode step.
PROMPT, REQUESTS, BEFORE = 128, 16, 64
#: Steps of a round, by case.
STEPS = {"decode 1": 6, "decode 16": 4, "prompt 1": 1, "prompt 4": 1}


class Side:
    """One way to compute the model, with KV pages for all requests."""

    def __init__(self, folder: BlockFolder, *, ranks: int, threads: int) -> None:
        pages = -(-(PROMPT + 1) // PAGE)
        loaded = executors_for(folder, threads=threads, ranks=ranks).load(
            folder, 1, folder.model.blocks, pages=REQUESTS * pages
        )
        assert isinstance(loaded, StageExecutor)
        self.stage = loaded
        self._pages = [loaded.pool.allocate(pages) for _ in range(REQUESTS)]
        self._tokens = np.random.default_rng(1).integers(0, folder.model.vocab_size, 4 * PROMPT).astype(np.int32)

    def step(self, case: str) -> tuple[float, bytes]:
        """Returns the seconds of a step, and its logits."""
        kind, count = case.split()
        rows, first = (1, BEFORE) if kind == "decode" else (PROMPT, 0)
        segments = [Segment(rows=rows, first_position=first, pages=pages) for pages in self._pages[: int(count)]]
        total = rows * int(count)
        batch = Batch(segments=segments, tokens=self._tokens[:total], wanted=range(rows - 1, total, rows))
        began = time.perf_counter()
        logits = self.stage.run(batch).logits
        seconds = time.perf_counter() - began
        assert logits is not None
        return seconds, logits.tobytes()


def weight_bytes(pid: int | str) -> int:
    """Returns the private memory of a process: packed weights and buffers, and what a process without them has."""
    status = Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1]
    return 1024 * int(status.split()[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the figures, and returns the exit code: 1 if the sides give different bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="block folder of w8a8 or w4a8")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    folder = open_block_folder(chosen.model, blocks=[])
    empty = weight_bytes("self")
    shared = Side(folder, ranks=chosen.ranks, threads=chosen.threads)
    group = shared.stage.group
    assert group is not None
    held = [weight_bytes(pid) - empty for pid in ("self", *group.pids)]
    alone = Side(folder, ranks=1, threads=chosen.ranks * chosen.threads)
    whole = weight_bytes("self") - empty - held[0]
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    different = False
    for _ in range(chosen.rounds):
        bits: dict[str, set[bytes]] = defaultdict(set)
        for name, side in (("one", alone), ("ranks", shared)):
            for case in (case for case, steps in STEPS.items() for _ in range(steps)):
                spent, logits = side.step(case)
                seconds[case][name].append(spent)
                bits[case].add(logits)
        different |= any(len(each) > 1 for each in bits.values())
    figures = {f"memory of rank {rank} over that of one": round(size / whole, 3) for rank, size in enumerate(held)}
    for case, sides in seconds.items():
        one, ranks = median(sides["one"]), median(sides["ranks"])
        figures |= {f"{case}: one ms": round(1e3 * one, 2), f"{case}: ranks ms": round(1e3 * ranks, 2)}
        figures[f"{case}: ratio"] = round(one / ranks, 3)
    for side in (shared, alone):
        side.stage.close()
    print(json.dumps(figures) if chosen.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))
    if different:
        print("the sides gave different bits", file=sys.stderr)
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
