"""Times int8 and int4 matmuls, and decode steps, with each instruction set: `python -m bench.matmuls [FOLDER]`.

The instruction sets take turns, and each must give the same bits. Printed are the median microseconds of a matmul by
its shape and number of rows; for the block folder FOLDER, the tokens per second of 1, 4 and 16 requests; and the ratios
to `avx512`, which has no integer instructions of its own. Exit code 1 if bits differ.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.gpu_kit.speed import decoding
from bench.kernels import median_us
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.host.cpu import cpu_name
from blockrelay_worker.execution.cpu.loading import load_stage
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels import load_kernels, supported_isas

#: Depth and columns of a matmul: MLP and attention of a 1.1B Llama.
SHAPES = ((2048, 8192), (8192, 2048), (2048, 3072))
ROWS = (1, 4, 8, 16, 64, 256)
GROUP = 32
REQUESTS, PROMPT, NEW = (1, 4, 16), 64, 48
TURNS = 3
#: The instruction set that others are compared with.
PLAIN = "avx512"


def matmuls(isas: Sequence[str], threads: int, seconds: float) -> bool:
    """Prints the median microseconds of matmuls; returns True if all instruction sets give the same bits.

    Each is repeated for `seconds` in every turn, on `threads` threads.
    """
    rng, same = np.random.default_rng(0), True
    for depth, columns in SHAPES:
        q = rng.integers(-127, 128, (depth, columns), np.int8)
        q4 = rng.integers(0, 256, (depth // 2, columns), np.uint8)
        gs = rng.random((depth // GROUP, columns), np.float32).astype(np.float16)
        gm = (-8 * gs).astype(np.float16)
        kernels = {isa: load_kernels(threads, isa=isa) for isa in isas}
        int8 = {isa: own.matmul(q, gs[0].astype(np.float32)) for isa, own in kernels.items()}
        int4 = {isa: own.group_matmul(q4, gs, gm) for isa, own in kernels.items()}
        for rows in ROWS:
            u = rng.integers(1, 256, (rows, depth), np.uint8)
            scale = rng.random((rows, depth // GROUP), np.float32)
            for name, layers, scales in (("int8", int8, ()), ("int4", int4, (scale,))):
                outs = {isa: np.empty((rows, columns), np.float32) for isa in isas}
                spent: dict[str, list[float]] = {isa: [] for isa in isas}
                for turn in range(TURNS):
                    for isa in isas if turn % 2 == 0 else reversed(isas):
                        spent[isa].append(median_us(partial(layers[isa], u, outs[isa], *scales), seconds))
                same &= all(np.array_equal(outs[isas[0]], out) for out in outs.values())
                figures = _compared(spent, "us", inverse=True)
                print(f"{name}, {depth} x {columns}, {rows:3d} rows: {figures}", flush=True)
    return same


def steps(folder: Path, isas: Sequence[str], threads: int) -> None:
    """Prints the tokens per second of a model's decode steps on `threads` threads."""
    opened = open_block_folder(folder)
    for requests in REQUESTS:
        spent: dict[str, list[float]] = {isa: [] for isa in isas}
        for turn in range(TURNS):
            for isa in isas if turn % 2 == 0 else reversed(isas):
                kernels = load_kernels(threads, isa=isa)
                pages = requests * pages_for(PROMPT + NEW)
                stage = load_stage(opened, 1, opened.model.blocks, pages=pages, threads=threads, kernels=kernels)
                spent[isa].append(decoding(stage, requests, NEW, opened.model.vocab_size)["tok_s"])
                stage.close()
        print(f"{folder.name}, {requests:2d} requests: {_compared(spent, 'tok/s', inverse=False)}", flush=True)


def _compared(spent: Mapping[str, Sequence[float]], unit: str, *, inverse: bool) -> str:
    """Returns the median of each instruction set, and how many times as fast as PLAIN it is.

    `inverse`: the figures are times, of which the smaller is the faster.
    """
    medians = {isa: statistics.median(values) for isa, values in spent.items()}
    plain = medians.get(PLAIN)
    ratio = {isa: (plain / each if inverse else each / plain) if plain else 0.0 for isa, each in medians.items()}
    return "  ".join(f"{isa} {each:.0f} {unit} ({ratio[isa]:.2f})" for isa, each in medians.items())


def main() -> int:
    """Prints all figures and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="block folder of precision w8a8 or w4a8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds of each matmul in each turn")
    parser.add_argument("--isas", nargs="*", default=[isa for isa in supported_isas() if isa != "baseline"])
    options = parser.parse_args()
    print(f"{cpu_name()}, {options.threads} threads, {', '.join(options.isas)}")
    same = matmuls(options.isas, options.threads, options.seconds)
    if options.folder is not None:
        steps(options.folder, options.isas, options.threads)
    print("the same bits" if same else "BITS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
