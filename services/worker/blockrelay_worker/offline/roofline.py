"""`python -m blockrelay_worker.offline.roofline`: how near the steps of a model come to what this machine gives.

Measured in one run: what memory gives (read by all threads), the multiply-adds of the byte and the float unit in
registers, and the steps of each case. A block needs the longer one of two times: that to read its weights and the keys
and values that it attends to, and that of its multiply-adds. Prints one JSON object, or tables.

The byte unit is that of the w8a8 kernels: AMX tiles, where the CPU has them. w4a8's products are faster on CPUs without
VNNI, and use no tiles.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from blockrelay.block_folder.analysis import BlockCost, analyse
from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.model import is_exact
from blockrelay.block_folder.precisions import kv_item_bytes
from blockrelay.command_app import run_app
from blockrelay.errors import UsageError
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.loader import executors_for
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.kernels.buffers import huge_page_bytes
from blockrelay_worker.kernels.interface import Kernels

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

#: Bytes that most CPU caches do not hold; multiply-add steps of about a millisecond for each part of the work.
_MEMORY, _STEPS = 512 << 20, 200_000
#: Number of runs: the best one of a peak counts, and the median of a case.
_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What the machine gives: bytes, and multiply-adds of bytes and of float32, in a second."""

    memory: float
    bytes: float
    floats: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step: (position of the first row, rows) of each request, and the number of rows with logits."""

    segments: tuple[tuple[int, int], ...]
    wanted: int

    @property
    def rows(self) -> int:
        """Rows of all requests."""
        return sum(rows for _, rows in self.segments)

    @property
    def attended(self) -> int:
        """Tokens that all rows attend to, each to itself and those before it."""
        return sum(rows * first + rows * (rows + 1) // 2 for first, rows in self.segments)

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are read."""
        return sum(first + rows for first, rows in self.segments)


def decode_step(requests: int, prompt: int) -> Step:
    """A step of `requests` requests, each with one row behind `prompt` tokens."""
    return Step(((prompt, 1),) * requests, requests)


def prompt_steps(prompt: int, max_rows: int) -> Iterator[Step]:
    """The steps of one prompt, in chunks of at most `max_rows` rows."""
    for first in range(0, prompt, max_rows):
        rows = min(max_rows, prompt - first)
        yield Step(((first, rows),), int(first + rows == prompt))


def needed_s(cost: BlockCost, step: Step, precision: str, item_bytes: int, peaks: Peaks) -> tuple[float, float]:
    """Returns the seconds that one block of a step needs for memory, and those for its multiply-adds. Pure.

    `precision`: that of the block; `item_bytes`: of a number in the KV.
    """
    if not cost.layers and not step.wanted:
        return 0.0, 0.0
    read = cost.step_bytes[precision] + cost.kv_values_per_token * item_bytes * step.cached  # pyright: ignore[reportArgumentType]
    rows = step.rows if cost.layers else step.wanted
    linear = cost.flops_per_row * rows / 2
    attention = cost.attention_flops * step.attended / 2
    unit = peaks.bytes if is_exact(precision) else peaks.floats  # pyright: ignore[reportArgumentType]
    return read / peaks.memory, linear / unit + attention / peaks.floats


def measure_peaks(kernels: Kernels) -> Peaks:
    """Measures what the machine gives to the threads of `kernels`, which must have matmuls."""
    memory, total, made = huge_page_bytes(_MEMORY), np.zeros(1, np.uint64), np.zeros(1)
    memory[:] = 1

    def best(name: str, *arguments: Any) -> float:
        times: list[float] = []
        for _ in range(_RUNS):
            started = time.perf_counter()
            kernels.call(name, *arguments)
            times.append(time.perf_counter() - started)
        return min(times)

    seconds = best("read_all", memory, _MEMORY, total)
    rates: list[float] = []
    for floats in (0, 1):
        spent = best("multiply_adds", _STEPS, floats, made)
        rates.append(float(made[0]) / spent)
    return Peaks(memory=_MEMORY / seconds, bytes=rates[0], floats=rates[1])


def roofline(
    folder: BlockFolder, executor: Executor, peaks: Peaks, cases: Sequence[tuple[str, Sequence[Step]]]
) -> list[dict[str, Any]]:
    """Runs each case, a name and steps, and returns its entry.

    It has the milliseconds needed and seen of layers, head and all, and their ratio. `executor` has the whole model,
    with pages for the largest step. A case has the steps of the same requests, in order.
    """
    costs, entries = analyse(folder.model).blocks, list[dict[str, Any]]()
    precisions = folder.manifest.precisions
    item_bytes = kv_item_bytes(precisions)
    for name, steps in cases:
        seen = _seen(folder, executor, steps)
        needed: dict[str, list[tuple[float, float]]] = {}
        for cost, precision in zip(costs, precisions, strict=True):
            needed[cost.name] = [needed_s(cost, step, precision, item_bytes, peaks) for step in steps]
        kinds = {"layers": [c.name for c in costs if c.layers], "head": [c.name for c in costs if not c.layers]}
        first = steps[0].segments
        entry: dict[str, Any] = {"case": name, "requests": len(first), "prompt": first[0][0] or steps[-1].cached}
        for kind, names in {**kinds, "step": [cost.name for cost in costs]}.items():
            both = [times for name in names for times in needed[name]]
            need, took = sum(map(max, both)), sum(seen[name] for name in names)
            memory, units = (sum(times) for times in zip(*both, strict=True))
            entry[kind] = {
                "needed_ms": round(1000 * need, 6),
                "seen_ms": round(1000 * took, 6),
                "ratio": round(need / took, 3),
                "bound": "memory" if memory > units else "units",
            }
        entries.append(entry)
    return entries


def _seen(folder: BlockFolder, executor: Executor, steps: Sequence[Step]) -> dict[str, float]:
    """Returns the seconds of each block in all steps together, the median of _RUNS runs."""
    pages = [executor.pool.allocate(pages_for(first + rows)) for first, rows in steps[-1].segments]
    samples: dict[str, list[float]] = {}
    for run in range(-1, _RUNS):
        total: dict[str, float] = {}
        for step in steps:
            for block, seconds in executor.run(_batch(folder, step, pages)).seconds.items():
                total[block] = total.get(block, 0.0) + seconds
        if run >= 0:  # the first one warms up
            for block, seconds in total.items():
                samples.setdefault(block, []).append(seconds)
    for own in pages:
        executor.pool.free(own)
    return {block: median(seconds) for block, seconds in samples.items()}


def _batch(folder: BlockFolder, step: Step, pages: Sequence[Sequence[int]]) -> Batch:
    """The batch of a step; the content of its pages does not change the time."""
    segments = [
        Segment(rows=rows, first_position=first, pages=own)
        for (first, rows), own in zip(step.segments, pages, strict=True)
    ]
    tokens = np.random.default_rng(1).integers(0, folder.model.vocab_size, step.rows, dtype=np.int32)
    return Batch(segments=segments, tokens=tokens, wanted=range(step.rows - step.wanted, step.rows))


@app.command()
def main(
    model: Annotated[Path, typer.Option()],
    threads: Annotated[int, typer.Option(min=1)],
    max_rows: Annotated[int, typer.Option(min=1)],
    requests: Annotated[list[int], typer.Option(min=1, help="a number of requests at once; several times for several")],
    prompt: Annotated[list[int], typer.Option(min=1, help="tokens of a prompt; several times for several")],
) -> None:
    """Print the roofline of decode steps and prompts as JSON."""
    folder, kernels = open_block_folder(model), load_kernels(threads)
    if not kernels.has_matmul:
        raise UsageError("a roofline needs compiled kernels, and there are none here; `blockrelay devices` says why")
    cases: list[tuple[str, list[Step]]] = []
    for length in prompt:
        cases += [("decode", [decode_step(n, length)]) for n in requests]
        cases.append(("prompt", list(prompt_steps(length, max_rows))))
    peaks = measure_peaks(kernels)
    pages = max(requests) * pages_for(max(prompt) + 1)
    executor = executors_for(folder, threads=threads).load(folder, 1, folder.model.blocks, pages=pages)
    report = {
        "kernels": kernels.isa,
        "memory_gb_s": round(peaks.memory / 1e9, 2),
        "byte_gmac_s": round(peaks.bytes / 1e9, 1),
        "float_gmac_s": round(peaks.floats / 1e9, 1),
        "cases": roofline(folder, executor, peaks, cases),
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    sys.exit(run_app(app, name="python -m blockrelay_worker.offline.roofline"))
